// Package privatemounts runs tests that mount file systems in a separate mount namespace. The
// mounts are not visible to other processes, and the kernel removes them when the test process
// exits in any way.
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

// Main runs the tests of m in a private mount namespace, and exits. TestMain must call it. Without
// root privileges, it runs the tests in the current namespace, and SkipUnlessPrivate skips tests
// that mount. m is a *testing.M, or a wrapper around it.
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

// SkipUnlessPrivate skips the test t unless Main runs it in a private mount namespace. Tests that
// mount must call it.
func SkipUnlessPrivate(t testing.TB) {
	t.Helper()
	if os.Getenv(insideEnv) == "" {
		t.Skip("mounting needs root")
	}
}
