// Package privatemounts lets tests create real mounts without side effects. The tests run in a
// process with its own mount namespace, which is removed with the process however it exits.
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

const insideEnv = "KEELSON_TEST_PRIVATE_MOUNTS"

// Main must be called from TestMain. As root, it runs the tests in a private mount namespace.
// Otherwise it runs them directly, and SkipUnlessPrivate skips tests that mount. m is a *testing.M,
// or a wrapper that removes what all tests of a package share.
func Main(m interface{ Run() int }) {
	if os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	if os.Getenv(insideEnv) != "" {
		if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
			fmt.Fprintln(os.Stderr, "making mounts private:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	c := exec.Command("/proc/self/exe", os.Args[1:]...)
	c.Env = append(os.Environ(), insideEnv+"=1")
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

// SkipUnlessPrivate skips a test that mounts if it does not run in a private mount namespace.
func SkipUnlessPrivate(t testing.TB) {
	t.Helper()
	if os.Getenv(insideEnv) == "" {
		t.Skip("mounting needs root")
	}
}
