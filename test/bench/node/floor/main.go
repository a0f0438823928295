// Command floor compares the cost of a pod on this machine with the minimum for any runtime: a
// network namespace, CNI ADD, and two containers made by runc (pause and one more). Both are
// measured in turn in the same run, because the speed of the machine changes; their ratio is the
// result.
//
//	go run ./test/bench/node/floor -bin bin -images bin/images [-cni bin/cni] [-n 20] [-json FILE]
//
// It runs in its own network namespace, so that the plugins' bridge is separate from the machine's
// network.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

type options struct {
	bin, images, cni, json string
	n                      int
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "directory with keelson-shim, keelson-oci and keelson-pause")
	flag.StringVar(&o.images, "images", "bin/images", "directory with tools.tar")
	flag.StringVar(&o.cni, "cni", "", "directory with bridge and host-local; empty = no CNI on either side")
	flag.StringVar(&o.json, "json", "", "append the results to this file as JSON lines")
	flag.IntVar(&o.n, "n", 20, "number of pods of each runtime")
	flag.Parse()
	if err := compareRuntimes(o); err != nil {
		fmt.Fprintln(os.Stderr, "floor:", err)
		os.Exit(1)
	}
}

// insideEnv marks the child process that runs in the network namespace.
const insideEnv = "KEELSON_FLOOR_INSIDE"

func compareRuntimes(o options) error {
	if os.Geteuid() != 0 {
		return errors.New("root is required")
	}
	if os.Getenv(insideEnv) == "" {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Env = append(os.Environ(), insideEnv+"=1")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		return cmd.Run()
	}
	dir, err := os.MkdirTemp("", "keelson-floor-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	network := &cniPlugins{dir: o.cni, state: filepath.Join(dir, "ipam")}
	ref, err := newRuncRuntime(dir, network)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	own, err := newKeelsonRuntime(ctx, o, dir, network, log)
	if err != nil {
		return err
	}
	defer own.close()
	m := durations{}
	for i := range o.n {
		// In turn, so that other work on the machine affects both.
		if err := ref.measurePod(ctx, i, m); err != nil {
			return fmt.Errorf("reference: %w", err)
		}
		if err := own.measurePod(ctx, i, m); err != nil {
			return fmt.Errorf("keelson: %w", err)
		}
	}
	return printReport(o, m)
}

// durations maps the name of a step to its durations in all pods.
type durations map[string][]time.Duration

func (m durations) addSince(name string, since time.Time) {
	m[name] = append(m[name], time.Since(since))
}

func durationQuantile(d []time.Duration, q float64) time.Duration {
	s := slices.Sorted(slices.Values(d))
	return s[min(int(q*float64(len(s))), len(s)-1)]
}

func printReport(o options, m durations) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "measure\tp50\tp99\t")
	names := slices.Sorted(func(yield func(string) bool) {
		for n := range m {
			if !yield(n) {
				return
			}
		}
	})
	ms := func(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }
	for _, n := range names {
		fmt.Fprintf(w, "%s\t%s\t%s\t\n", n, ms(durationQuantile(m[n], 0.5)), ms(durationQuantile(m[n], 0.99)))
	}
	floor, own := durationQuantile(m["floor: pod"], 0.5), durationQuantile(m["keelson: pod"], 0.5)
	fmt.Fprintf(w, "keelson / floor\t%.2f\t\t\n", float64(own)/float64(floor))
	if err := w.Flush(); err != nil {
		return err
	}
	if o.json == "" {
		return nil
	}
	f, err := os.OpenFile(o.json, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	e := json.NewEncoder(f)
	for _, n := range names {
		err := e.Encode(map[string]any{"measure": n, "params": map[string]any{"n": o.n, "cni": o.cni != ""},
			"values": map[string]float64{"p50_ms": durationQuantile(m[n], 0.5).Seconds() * 1e3,
				"p99_ms": durationQuantile(m[n], 0.99).Seconds() * 1e3}})
		if err != nil {
			return err
		}
	}
	return nil
}

// runCommand runs a program and returns its stdout. An error includes the program's output.
func runCommand(ctx context.Context, env []string, stdin string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s%s", err, out, exit.Stderr)
		}
		return "", fmt.Errorf("%s %s: %w", filepath.Base(name), strings.Join(args, " "), err)
	}
	return string(out), nil
}
