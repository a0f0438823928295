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
	"runtime"
	"time"

	"keelson.dev/keelson/deploy/lab"
)

// Loan is a lab for the time of one run.
type Loan struct {
	*lab.Lab
	Owned bool // the run made it: it may kill all of it, and Return takes it away
}

// root is the project's folder.
func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..", "..")
}

// Lab returns the lab that is up. Without one it makes a lab of three replicas
// and three workers from the binaries below bin/ (or $KEELSON_BIN).
func Lab(out io.Writer) (*Loan, error) {
	l, err := lab.Open(out)
	if err == nil {
		return &Loan{Lab: l}, nil
	}
	if !errors.Is(err, lab.ErrNotUp) {
		return nil, err
	}
	bin := filepath.Join(root(), "bin")
	if b := os.Getenv("KEELSON_BIN"); b != "" {
		bin = b
	}
	dir, err := os.MkdirTemp("", "keelson-test-")
	if err != nil {
		return nil, err
	}
	l, err = lab.New(lab.Config{
		ControlPlanes: 3, Workers: 3, Listen: "127.0.0.1:6443",
		BinDir: bin, CNIBinDir: filepath.Join(bin, "cni"), ImageDir: filepath.Join(bin, "images"),
		CPU: "4", Memory: "2Gi", EvictionSeconds: 5, Kubeconfig: filepath.Join(dir, "kubeconfig"),
	}, out)
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
	_ = os.RemoveAll(filepath.Dir(l.Config.Kubeconfig))
	if left := lab.Leftovers(); len(left) > 0 {
		return fmt.Errorf("the lab left behind: %v", left)
	}
	return nil
}
