"""`python -m twinreel`, so that `torchrun -m twinreel` works."""

from twinreel.cli import main

if __name__ == "__main__":
    main()
