package remains

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
	"keelson.dev/keelson/test/testenv/borrow"
)

// A user's lab survives the loss of all its processes: 'lab up' restores all of it after SIGKILL,
// after a reboot, and after 'lab up' was itself killed. A lab whose creation failed is recreated.
// Tests do not delete it.
func TestLabOfAPerson(t *testing.T) {
	p := newLabUser(t)
	p.interruptUp(func() bool { _, err := os.Stat("/var/lib/keelson-lab/hosts/cp1"); return err == nil })
	p.requireRefused("is unfinished", "lab", "status")
	p.requireTestsRefused("is unfinished")
	p.requireOutput("was cut off", p.up...)
	p.createObjects()

	killAll(t)
	p.requireRefused(isDown, "lab", "status")
	p.requireRefused(isDown, "lab", "exec", "w1", "true")
	p.requireRefused("--workers 1, not 2", "lab", "up", "--workers=2")
	p.requireTestsRefused(isDown)
	p.restartLab()
	p.requireOutput("up already", "lab", "up")

	p.killForwarder()
	p.requireTestsRefused("repair the running lab")
	p.requireOutput("'kctl lab up' mends that", "lab", "status")
	p.requireOutput("starting it again", "lab", "up")
	p.objectVersions()

	p.simulateReboot()
	p.removeFields("maker", "built")
	if err := os.Remove(p.kubeconfig); err != nil {
		t.Fatal(err)
	}
	p.interruptUp(lab.IsAnyProcessAlive)
	p.requireRefused(isDown, "lab", "status")
	p.restartLab()
}

// The lab of a killed test run is deleted by the next run, with its temporary files, whether the
// lab is running or not. The lab of a run in progress is shared.
func TestLabOfADeadTestRun(t *testing.T) {
	for _, dead := range []string{"the run alone", "everything"} {
		run := startLabMaker(t)
		there, err := borrow.FindLab(t.Output())
		if err != nil || there == nil || !there.Config.TestRun || there.Config.Maker.PID != run.Process.Pid {
			t.Fatalf("the lab of a run in progress: %+v %v", there, err)
		}
		_ = run.Process.Kill()
		_ = run.Wait()
		if dead == "everything" {
			killAll(t)
		}
		began := time.Now()
		loan, err := borrow.FindLab(t.Output())
		if err != nil || loan != nil {
			t.Fatalf("the lab of a dead run, dead is %s: %v %v", dead, loan, err)
		}
		t.Logf("dead was %s: taken away in %s", dead, time.Since(began).Round(time.Millisecond))
		for _, path := range []string{filepath.Dir(there.Config.Kubeconfig), there.Config.ControlPlaneFiles} {
			if _, err := os.Stat(path); path == "" || !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("folder %q of the dead run: %v, want it gone", path, err)
			}
		}
		if left := lab.ListLeftovers(); len(left) > 0 {
			t.Fatalf("left behind: %v", left)
		}
	}
}

// startLabMaker starts a test run and waits until it has created its lab.
func startLabMaker(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), role+"="+labMaker)
	cmd.Stderr = t.Output()
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if lines.Text() == "made" {
			return cmd
		}
		fmt.Fprintln(t.Output(), lines.Text())
	}
	t.Fatalf("the run made no lab: %v", cmd.Wait())
	return nil
}

// killAll kills every process of the lab.
func killAll(t *testing.T) {
	t.Helper()
	n, err := testenv.KillEverything()
	if least := 4; err != nil || n < least { // a replica, the registry, the supervisor and its forwarder
		t.Fatalf("killed %d processes of the lab, want all of %d and more: %v", n, least, err)
	}
	t.Logf("killed all %d processes of the lab", n)
}
