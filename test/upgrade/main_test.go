// Package upgrade has a cluster of the release before become one of this release, and go back, while it serves: three
// replicas and two workers of a lab, with programs of both releases in every pairing.
package upgrade

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// previous is the folder of the programs of the release before.
var previous string

func TestMain(m *testing.M) { os.Exit(runOnLab(m)) }

func runOnLab(m *testing.M) int {
	if os.Geteuid() != 0 {
		fmt.Println("skipped: a lab needs root")
		return 0
	}
	var err error
	previous, err = buildPrevious()
	if e := (*exec.ExitError)(nil); errors.As(err, &e) && e.ExitCode() == notHere {
		fmt.Println("skipped, needs the history of this project:", err)
		return 0
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return testenv.MainOn(func(c *lab.Config) {
		c.Workers, c.Programs = 2, previous
		c.EvictionSeconds = 300 // pods stay on a node with a stopped agent
		c.ControlPlaneFlags = []string{"--shutdown-delay-duration=" + shutdownDelay.String()}
	}, m)
}

// shutdownDelay is half of the default, and still twice the time in which the lab's forwarder
// notices it.
const shutdownDelay = 2 * time.Second

// notHere is how scripts/previous ends where the clone lacks the commit: shallow ones do.
const notHere = 3

// buildPrevious builds the previous release unless it is built already.
func buildPrevious() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join("..", "..", "scripts", "previous"))
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	began := time.Now()
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("building the release before: %w: %s", err, errs.String())
	}
	fmt.Printf("the previous release is built after %s\n", time.Since(began).Round(time.Millisecond))
	return strings.TrimSpace(out.String()), nil
}
