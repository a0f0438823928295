package borrow

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/lab"
)

// A test run uses a running lab and deletes a lab that another run left behind. It never deletes a
// user's lab or that of a run in progress.
func TestDecide(t *testing.T) {
	self, gone := process(t)
	for name, c := range map[string]struct {
		state lab.State
		test  bool
		maker *lab.Process
		want  labAction
		err   string
	}{
		"none":                             {state: lab.NoLab, want: buildOne},
		"a person's":                       {state: lab.Running, maker: gone, want: borrowIt},
		"a person's of an earlier release": {state: lab.Running, want: borrowIt},
		"a person's that is down": {state: lab.Down, maker: gone,
			err: "the lab on this machine is down: start it with 'kctl lab up' or take it away with 'kctl lab down'"},
		"a person's that is unfinished":      {state: lab.Unfinished, maker: gone, err: "'kctl lab down'"},
		"down, a person's of an earlier one": {state: lab.Down, err: "is down"},
		"a run's that has ended":             {state: lab.Running, test: true, maker: gone, want: replaceIt},
		"a run's that has ended, down":       {state: lab.Down, test: true, maker: gone, want: replaceIt},
		"a run's that has ended, unfinished": {state: lab.Unfinished, test: true, maker: gone, want: replaceIt},
		"lab of a run in progress":           {state: lab.Running, test: true, maker: self, want: borrowIt},
		"lab of a run in progress, down": {state: lab.Down, test: true, maker: self,
			err: "wait until it has ended"},
		"a run's of an earlier release":         {state: lab.Running, test: true, want: borrowIt},
		"a run's of an earlier release, down":   {state: lab.Down, test: true, want: replaceIt},
		"a run's of an earlier one, unfinished": {state: lab.Unfinished, test: true, want: replaceIt},
		"at work on it is a process": {state: lab.Busy, test: true, maker: gone,
			err: "wait until it has ended"},
	} {
		f := lab.Found{State: c.state, Test: c.test, Lab: &lab.Lab{Config: lab.Config{Maker: c.maker, AtWork: self}}}
		got, err := chooseAction(f)
		if c.err == "" && (err != nil || got != c.want) {
			t.Errorf("%s: %d, %v, want %d", name, got, err, c.want)
		}
		if c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.err)
		}
		if c.state == lab.Down && !c.test && !errors.Is(err, lab.ErrDown) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// process returns a running process and one that has exited.
func process(t *testing.T) (lives, gone *lab.Process) {
	t.Helper()
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	gone = lab.ProcessOf(child.Process.Pid)
	_ = child.Process.Kill()
	_ = child.Wait()
	return lab.ProcessOf(os.Getpid()), gone
}
