package lab

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// What state a lab is in follows from what is found of it: only one that was finished and of which a process lives is up.
func TestStateOfALab(t *testing.T) {
	for name, c := range map[string]struct {
		labFacts
		want State
	}{
		"up":                             {labFacts{built: true, alive: true}, Running},
		"killed, or after a reboot":      {labFacts{built: true}, Down},
		"being built":                    {labFacts{busy: true}, Busy},
		"being built, daemons live":      {labFacts{busy: true, alive: true}, Busy},
		"being started again":            {labFacts{busy: true, built: true}, Busy},
		"building cut off":               {labFacts{interrupted: true}, Unfinished},
		"building cut off, daemons live": {labFacts{interrupted: true, alive: true}, Unfinished},
		"start cut off":                  {labFacts{interrupted: true, built: true}, Down},
		"start cut off, daemons live":    {labFacts{interrupted: true, built: true, alive: true}, Down},
		"of a release before, up":        {labFacts{legacy: true, alive: true, initialized: true}, Running},
		"of a release before, killed":    {labFacts{legacy: true, initialized: true}, Down},
		"of a release before, cut off":   {labFacts{legacy: true}, Unfinished},
		// as that release takes it
		"of a release before, being built":    {labFacts{legacy: true, alive: true}, Running},
		"of a release before, now taken away": {labFacts{legacy: true, busy: true, initialized: true}, Busy},
	} {
		if got := c.labState(); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
	for state, want := range map[State]error{NoLab: ErrNotUp, Busy: nil, Unfinished: errUnfinished, Down: ErrDown,
		Running: nil} {
		if err := (Found{State: state}).StateError(); !errors.Is(err, want) {
			t.Errorf("state %d: %v, want %v", state, err, want)
		}
	}
	busy := Found{State: Busy, Lab: &Lab{Config: Config{AtWork: &Process{PID: 4711}}}}
	if err := busy.BusyError(); err == nil || !strings.Contains(err.Error(), "4711") {
		t.Errorf("a lab at which process 4711 is at work: %v", err)
	}
}

// A process is distinguished from a later process with the same PID, also after a reboot.
func TestProcessLives(t *testing.T) {
	own := thisProcess()
	if !own.IsAlive() {
		t.Errorf("this process, %+v, is said to be gone", own)
	}
	for name, p := range map[string]*Process{
		"another that had the number": {PID: own.PID, Start: own.Start + 1, Boot: own.Boot},
		"one before the reboot":       {PID: own.PID, Start: own.Start, Boot: "another"},
		"one that could not be told":  {PID: own.PID},
		"nobody":                      nil,
	} {
		if p.IsAlive() {
			t.Errorf("%s is said to live", name)
		}
	}
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	p := ProcessOf(child.Process.Pid)
	if !p.IsAlive() {
		t.Errorf("a child, %+v, is said to be gone", p)
	}
	_ = child.Process.Kill()
	_ = child.Wait()
	if p.IsAlive() {
		t.Errorf("a child that ended, %+v, is said to live", p)
	}
}

// Releases read each other's lab.json: what is not known is passed over, and what an earlier one did not write is empty.
func TestConfigOfOtherReleases(t *testing.T) {
	var c Config
	later := `{"workers": 2, "maker": {"pid": 7, "start": 8, "boot": "b", "user": "u"}, "atWork": {"pid": 9}, ` +
		`"built": true, "colour": "blue"}`
	if err := json.Unmarshal([]byte(later), &c); err != nil {
		t.Fatal(err)
	}
	if c.Workers != 2 || c.Maker == nil || *c.Maker != (Process{7, 8, "b"}) || c.AtWork.PID != 9 || !c.Built {
		t.Errorf("%s is read as %+v", later, c)
	}
	c = Config{}
	if err := json.Unmarshal([]byte(`{"workers": 2}`), &c); err != nil || c.Maker != nil || c.AtWork != nil ||
		c.Built || c.TestRun {
		t.Errorf("that of an earlier release is read as %+v, %v", c, err)
	}
}

// Temporary folders go with the lab of a test run; nothing of a person's does, whatever it is called.
func TestFoldersOfATestRun(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	dir := func(parts ...string) string {
		d := filepath.Join(append([]string{tmp}, parts...)...)
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
		return d
	}
	for name, c := range map[string]struct {
		config Config
		gone   bool
	}{
		"a test run's": {Config{TestRun: true,
			Kubeconfig: dir("keelson-test-1") + "/kubeconfig", ControlPlaneFiles: dir("keelson-access-1")}, true},
		"a test run's with other temp files": {Config{TestRun: true,
			Kubeconfig: dir("elsewhere", "keelson-test-2") + "/kubeconfig"}, true},
		"a test run's of a release before": {Config{Kubeconfig: dir("keelson-test-3") + "/kubeconfig",
			ControlPlaneFiles: dir("keelson-access-3")}, true},
		"a person's": {Config{Kubeconfig: dir("mine") + "/kubeconfig",
			ControlPlaneFiles: dir("keelson-access-4")}, false},
		"a person's in a folder of such a name": {Config{Kubeconfig: dir("home", "keelson-test-5") + "/kubeconfig"},
			false},
		"a test run's in a person's folder": {Config{TestRun: true, Kubeconfig: dir("mine") + "/kubeconfig",
			ControlPlaneFiles: dir("access")}, false},
	} {
		if err := c.config.removeTestFolders(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, d := range []string{filepath.Dir(c.config.Kubeconfig), c.config.ControlPlaneFiles} {
			if d != "" && fileExists(d) == c.gone {
				t.Errorf("%s: folder %s is there: %t", name, d, !c.gone)
			}
		}
	}
}
