// Package borrow finds the lab that is running on this machine, or creates a lab for one run of a
// program and deletes it afterwards.
package borrow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"keelson.dev/keelson/deploy/lab"
)

// Loan is a lab for the time of one run.
type Loan struct {
	Lab   *lab.Lab
	Owned bool // the run created the lab: it may kill all of it, and Return deletes it
}

// projectFolder returns the project's folder: the working directory's nearest ancestor with
// deploy/lab. It does not use the paths of source files, which are missing from a program built
// with -trimpath.
func projectFolder() string {
	dir, err := os.Getwd()
	for err == nil && dir != filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "deploy", "lab", "lab.go")); err == nil {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	return "."
}

// AcquireLab returns the running lab, which must have at least this number of workers. If no lab
// exists, it creates one with three replicas and this number of workers from the binaries in bin/
// or $KEELSON_BIN. Each function in change can change the configuration of the new lab.
func AcquireLab(out io.Writer, workers int, change ...func(*lab.Config)) (*Loan, error) {
	l, err := FindLab(out)
	switch {
	case err != nil:
		return nil, err
	case l == nil:
		return createLab(out, workers, change)
	case l.Config.Workers < workers:
		return nil, fmt.Errorf("the running lab has %d workers, want at least %d: "+
			"delete it with 'kctl lab down', so that the tests create another lab", l.Config.Workers, workers)
	}
	return &Loan{Lab: l}, nil
}

// FindLab returns the running lab, or nil if no lab exists. It deletes a lab that an earlier test
// run left behind. It returns an error if a lab is down that was not created by a test run.
func FindLab(out io.Writer) (*lab.Lab, error) {
	found, err := lab.FindLab(out)
	if err != nil {
		return nil, err
	}
	do, err := chooseAction(found)
	if err != nil || do == buildOne {
		return nil, err
	}
	if do == borrowIt {
		// One error here is clearer than a failure of every test.
		err := errors.New("its API is not reachable")
		if found.Lab.ForwarderRuns() {
			err = found.Lab.AwaitAPI(context.Background())
		}
		if err != nil {
			return nil, fmt.Errorf("%w: repair the running lab ('kctl lab status' lists its hosts) "+
				"or delete it with 'kctl lab down'", err)
		}
		return found.Lab, nil
	}
	fmt.Fprintln(out, "deleting the lab of a test run that has ended")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return nil, found.Lab.Down(ctx)
}

// labAction is what a test run must do with the lab that it has found, for example use or replace
// it.
type labAction int

const (
	buildOne labAction = iota // no lab exists
	borrowIt
	replaceIt
)

// chooseAction returns the action for the found lab. A running lab is used. A lab that an ended
// test run left behind is replaced. A lab that is down, and belongs to a user or to a test run in
// progress, is an error.
func chooseAction(f lab.Found) (labAction, error) {
	if f.State == lab.NoLab {
		return buildOne, nil
	}
	if err := f.BusyError(); err != nil {
		return 0, err
	}
	maker := f.Lab.Config.Maker
	switch {
	case f.Test && maker != nil && !maker.IsAlive():
		return replaceIt, nil
	case f.State == lab.Running: // also the lab of a test run of unknown state, which may be in progress
		return borrowIt, nil
	case !f.Test:
		return 0, f.StateError()
	case maker == nil:
		return replaceIt, nil
	}
	return 0, fmt.Errorf("the lab on this machine is down and belongs to a test run, process %d: "+
		"wait until it has ended", maker.PID)
}

// createLab creates a lab that this run owns.
func createLab(out io.Writer, workers int, change []func(*lab.Config)) (*Loan, error) {
	bin := filepath.Join(projectFolder(), "bin")
	if b := os.Getenv("KEELSON_BIN"); b != "" {
		bin = b
	}
	listen, err := lab.FreeListen()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", lab.TestFolder)
	if err != nil {
		return nil, err
	}
	config := lab.Config{
		ControlPlanes: 3, Workers: workers, Listen: listen,
		BinDir: bin, CNIBinDir: filepath.Join(bin, "cni"), ImageDir: filepath.Join(bin, "images"),
		CPU: "4", Memory: "2Gi", EvictionSeconds: 5, Kubeconfig: filepath.Join(dir, "kubeconfig"), TestRun: true,
	}
	for _, f := range change {
		f(&config)
	}
	l, err := lab.New(config, out)
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		err = l.Up(ctx)
	}
	if err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	return &Loan{Lab: l, Owned: true}, nil
}

// Return deletes the lab if this run created it, and returns an error if anything of the lab is
// left on the machine. A lab that was running before stays.
func (l *Loan) Return() error {
	if !l.Owned {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := l.Lab.Down(ctx); err != nil {
		return err
	}
	if left := lab.ListLeftovers(); len(left) > 0 {
		return fmt.Errorf("the deleted lab left behind: %v", left)
	}
	return nil
}
