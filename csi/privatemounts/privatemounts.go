// Package privatemounts lets tests mount for real without a trace: they run again in
// a process with a mount namespace of its own, which takes all its mounts with it, however it ends.
package privatemounts

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const inside = "KEELSON_TEST_PRIVATE_MOUNTS"

// Main is to be called from TestMain. As root it runs the tests in a private mount
// namespace; otherwise it runs them as they are, and Need skips those that mount. m is a *testing.M, or what
// wraps it to remove what all tests of a package share.
func Main(m interface{ Run() int }) {
	if os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	if os.Getenv(inside) != "" {
		if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
			fmt.Fprintln(os.Stderr, "making mounts private:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	c := exec.Command("/proc/self/exe", os.Args[1:]...)
	c.Env = append(os.Environ(), inside+"=1")
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := c.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case err != nil:
		fmt.Fprintln(os.Stderr, "running the tests in a mount namespace:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Need skips a test that mounts where that is not possible.
func Need(t testing.TB) {
	t.Helper()
	if os.Getenv(inside) == "" {
		t.Skip("mounting needs root")
	}
}
