// Package remains has labs, and those who work on them, killed at any time, and looks at what the next one makes of what they
// leave. It makes labs of its own, on a machine of which the folders are its own too: when this run itself is killed, no lab of
// a person is left, which no run of tests would take away.
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

// What this program is started as, by itself.
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

// moveInside runs this program again where /var/lib, /run and the folder of temporary files are its own.
func moveInside() error {
	there, err := borrow.Find(os.Stdout)
	if err == nil && there != nil {
		err = errors.New("a lab is up, and these tests make labs of their own: take it away with 'kctl lab down'")
	}
	if err != nil {
		return err
	}
	script := "set -e; mount -t tmpfs -o mode=755 keelson-remains /var/lib; mount -t tmpfs -o mode=755 keelson-remains /run; mkdir /var/lib/tmp; exec \"$0\" \"$@\""
	cmd := exec.Command("unshare", append([]string{"--mount", "--propagation", "private", "sh", "-c", script}, os.Args...)...)
	cmd.Env = append(os.Environ(), role+"="+inside, "TMPDIR=/var/lib/tmp")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}

// makeLab is a run of tests that has made its lab and goes on until it is killed.
func makeLab() int {
	folder, err := os.MkdirTemp("", lab.AccessFolder)
	if err == nil {
		_, err = borrow.Lab(os.Stdout, 0, func(c *lab.Config) { c.ControlPlanes, c.ControlPlaneFiles = 1, folder })
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("made")
	_, _ = io.Copy(io.Discard, os.Stdin) // until who started it ends
	return 0
}
