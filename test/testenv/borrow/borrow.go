// Package borrow finds the lab that is up on this machine, or makes one for the
// run of a program and takes it away afterwards.
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
	*lab.Lab
	Owned bool // the run made it: it may kill all of it, and Return takes it away
}

// root is the project's folder: that above the test's own which has the lab's package. A program that was built with
// -trimpath does not know where its files were.
func root() string {
	dir, err := os.Getwd()
	for err == nil && dir != filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "deploy", "lab", "lab.go")); err == nil {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	return "."
}

// Lab returns the lab that is up, with at least so many workers. Without one it makes a lab of
// three replicas and so many workers from the binaries below bin/ (or $KEELSON_BIN), changed by what is asked for besides.
func Lab(out io.Writer, workers int, change ...func(*lab.Config)) (*Loan, error) {
	l, err := Find(out)
	switch {
	case err != nil:
		return nil, err
	case l == nil:
		return build(out, workers, change)
	case l.Config.Workers < workers:
		return nil, fmt.Errorf("the lab that is up has %d workers, want %d: take it down with 'kctl lab down', so that one is made", l.Config.Workers, workers)
	}
	return &Loan{Lab: l}, nil
}

// Find returns the lab that is up, nil where none exists. What a run of tests has left behind it takes away; a person's lab
// that is down stays, and is an error.
func Find(out io.Writer) (*lab.Lab, error) {
	found, err := lab.FindLab(out)
	if err != nil {
		return nil, err
	}
	do, err := decide(found)
	if err != nil || do == buildOne {
		return nil, err
	}
	if do == borrowIt {
		// Better one sentence now than every test by itself.
		err := errors.New("nothing leads to its API")
		if found.Lab.ForwarderRuns() {
			err = found.Lab.AwaitAPI(context.Background())
		}
		if err != nil {
			return nil, fmt.Errorf("%w: mend the lab that is up ('kctl lab status' shows its hosts) or take it away with 'kctl lab down'", err)
		}
		return found.Lab, nil
	}
	fmt.Fprintln(out, "taking away the lab of a run of tests that ended without doing so")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return nil, found.Lab.Down(ctx)
}

// verdict is what becomes of the lab that a run of tests finds.
type verdict int

const (
	buildOne verdict = iota // none exists
	borrowIt
	replaceIt
)

// decide says what a run of tests does with what it finds: it borrows a lab that runs, takes away what another run has left
// behind, and leaves alone what is a person's or belongs to a run that goes on.
func decide(f lab.Found) (verdict, error) {
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
	case f.State == lab.Running: // also one of a run of which nothing is known: it may go on
		return borrowIt, nil
	case !f.Test:
		return 0, f.StateError()
	case maker == nil:
		return replaceIt, nil
	}
	return 0, fmt.Errorf("the lab on this machine is down and belongs to a run of tests, process %d: wait until it has ended", maker.PID)
}

// build makes a lab that belongs to this run.
func build(out io.Writer, workers int, change []func(*lab.Config)) (*Loan, error) {
	bin := filepath.Join(root(), "bin")
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

// Return takes a lab away that the run made, and fails when something of it is
// left on the machine. One that was up before stays.
func (l *Loan) Return() error {
	if !l.Owned {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := l.Down(ctx); err != nil {
		return err
	}
	if left := lab.ListLeftovers(); len(left) > 0 {
		return fmt.Errorf("the lab left behind: %v", left)
	}
	return nil
}
