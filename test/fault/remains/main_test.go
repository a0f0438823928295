// Package remains kills labs, and the processes that use them, at any time and checks how the next
// command handles the remains. It creates its own labs on a machine with its own folders: if this
// run itself is killed, no user's lab is left, which no test run would delete.
package remains

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
	"keelson.dev/keelson/test/testenv/borrow"
)

// Modes in which this program starts itself.
const (
	role       = "KEELSON_REMAINS"
	inside     = "inside"      // the tests, with folders of their own
	labMaker   = "lab maker"   // a run of tests that makes a lab and has not ended
	otherTests = "other tests" // a package with tests on a lab
)

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case inside:
		os.Exit(m.Run())
	case labMaker:
		os.Exit(makeLab())
	case otherTests:
		os.Exit(testenv.Main(m))
	}
	if os.Geteuid() != 0 {
		fmt.Println("skipped: a lab needs root")
		os.Exit(0)
	}
	if err := moveInside(); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			os.Exit(exit.ExitCode())
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// moveInside runs this program again with its own /var/lib, /run and folder of temporary files.
func moveInside() error {
	there, err := borrow.FindLab(os.Stdout)
	if err == nil && there != nil {
		err = errors.New("a lab is up, and these tests make labs of their own: take it away with 'kctl lab down'")
	}
	if err != nil {
		return err
	}
	script := "set -e; mount -t tmpfs -o mode=755 keelson-remains /var/lib; mount -t tmpfs -o mode=755 " +
		"keelson-remains /run; mkdir /var/lib/tmp; exec \"$0\" \"$@\""
	cmd := exec.Command("unshare", append([]string{"--mount", "--propagation", "private", "sh", "-c", script},
		os.Args...)...)
	cmd.Env = append(os.Environ(), role+"="+inside, "TMPDIR=/var/lib/tmp")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}

// makeLab is a test run that creates its lab and continues until it is killed.
func makeLab() int {
	folder, err := os.MkdirTemp("", lab.AccessFolder)
	if err == nil {
		_, err = borrow.AcquireLab(os.Stdout, 0, func(c *lab.Config) {
			c.ControlPlanes, c.ControlPlaneFiles = 1, folder
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("made")
	_, _ = io.Copy(io.Discard, os.Stdin) // until the parent process exits
	return 0
}
