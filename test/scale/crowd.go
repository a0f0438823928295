package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/test/testenv/loopback"
)

// agentGroup is a group of agents that share a process.
type agentGroup struct {
	First   int      `json:"first"` // number of the first agent
	Count   int      `json:"count"`
	Servers []string `json:"servers"`
	Token   string   `json:"token"`
	Dir     string   `json:"dir"`
	Rate    float64  `json:"rate"` // most agents started per second
}

const (
	// maxJoining is the maximum number of agents of a process without a confirmed session.
	maxJoining = 10
	// checkpointEvery is long, so that checkpoints do not distort the measurement: thousands of
	// agents share one disk here.
	checkpointEvery = time.Hour
)

func nodeName(i int) string { return fmt.Sprintf("agent-%05d", i) }

// runAgents starts the agents one after the other and runs them until ctx ends. It returns the
// errors of agents that failed.
func (c agentGroup) runAgents(ctx context.Context) error {
	var (
		all    sync.WaitGroup
		mu     sync.Mutex
		failed error
		shared session.Shared
		slots  = make(chan struct{}, maxJoining)
		pace   = rate.NewLimiter(rate.Limit(c.Rate), 1)
	)
	defer all.Wait()
	why := &warningCounter{count: make(map[string]int)}
	all.Go(func() { why.printWarnings(ctx, os.Stderr) })
	for i := c.First; i < c.First+c.Count; i++ {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := pace.Wait(ctx); err != nil {
			return err
		}
		a := loopback.Agent{
			Name: nodeName(i), Servers: c.Servers, Token: c.Token, Dir: filepath.Join(c.Dir, nodeName(i)),
			Address:         fmt.Sprintf("100.%d.%d.%d", 64+i>>16, i>>8&0xff, i&0xff),
			Source:          net.IPv4(127, byte(64+i>>16), byte(i>>8), byte(i)),
			CheckpointEvery: checkpointEvery, Shared: &shared, Log: slog.New(why), Confirmed: func() { <-slots },
		}
		all.Go(func() {
			if err := a.Run(ctx); err != nil && ctx.Err() == nil {
				mu.Lock()
				defer mu.Unlock()
				failed = errors.Join(failed, fmt.Errorf("agent %s: %w", a.Name, err))
				fmt.Fprintln(os.Stderr, failed)
			}
		})
	}
	<-ctx.Done()
	all.Wait()
	return failed
}

// runAgentGroup is the main function of a process of agents. It reads the group as JSON from in,
// and runs it until in is closed or ctx ends.
func runAgentGroup(ctx context.Context, in io.Reader) error {
	var c agentGroup
	d := json.NewDecoder(in)
	if err := d.Decode(&c); err != nil {
		return fmt.Errorf("reading the group of agents: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	return c.runAgents(ctx)
}

// startProcess runs the group in a new process until ctx ends. wait returns when the process has
// exited.
func (c agentGroup) startProcess(ctx context.Context) (pid int, wait func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), roleEnv+"="+roleAgents)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, nil, err
	}
	if err := cmd.Start(); err != nil {
		return 0, nil, fmt.Errorf("starting a process of agents: %w", err)
	}
	if err := json.NewEncoder(in).Encode(c); err != nil {
		return 0, nil, fmt.Errorf("sending the group of agents to a process: %w", err)
	}
	return cmd.Process.Pid, func() error {
		err := cmd.Wait()
		if ctx.Err() != nil {
			return nil
		}
		return err
	}, nil
}
