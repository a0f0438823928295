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

// crowd is agents that share a process.
type crowd struct {
	First   int      `json:"first"` // number of the first
	Count   int      `json:"count"`
	Servers []string `json:"servers"`
	Token   string   `json:"token"`
	Dir     string   `json:"dir"`
	Rate    float64  `json:"rate"` // that come within a second, at most
}

const (
	// joiningAtOnce is how many agents of a crowd have not been told everything yet: machines do not all come in one second.
	joiningAtOnce = 10
	// checkpoints are rare: what they cost is not what is measured, and thousands of agents have one disk here.
	checkpointEvery = time.Hour
)

func nodeName(i int) string { return fmt.Sprintf("agent-%05d", i) }

// run runs the agents until ctx ends.
func (c crowd) run(ctx context.Context) error {
	var (
		all    sync.WaitGroup
		mu     sync.Mutex
		failed error
		shared session.Shared
		slots  = make(chan struct{}, joiningAtOnce)
		pace   = rate.NewLimiter(rate.Limit(c.Rate), 1)
	)
	defer all.Wait()
	why := &reasons{count: make(map[string]int)}
	all.Go(func() { why.tell(ctx, os.Stderr) })
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
			Address: fmt.Sprintf("100.%d.%d.%d", 64+i>>16, i>>8&0xff, i&0xff), Source: net.IPv4(127, byte(64+i>>16), byte(i>>8), byte(i)),
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

// crowdProcess is a process of agents. It is told which on its standard input, and ends when that does.
func crowdProcess(ctx context.Context, in io.Reader) error {
	var c crowd
	d := json.NewDecoder(in)
	if err := d.Decode(&c); err != nil {
		return fmt.Errorf("reading which agents to run: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	return c.run(ctx)
}

// process runs a crowd in a process of its own until ctx ends.
func (c crowd) process(ctx context.Context) (pid int, wait func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), asRole+"="+roleCrowd)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, nil, err
	}
	if err := cmd.Start(); err != nil {
		return 0, nil, fmt.Errorf("starting a process of agents: %w", err)
	}
	if err := json.NewEncoder(in).Encode(c); err != nil {
		return 0, nil, fmt.Errorf("telling a process which agents to run: %w", err)
	}
	return cmd.Process.Pid, func() error {
		err := cmd.Wait()
		if ctx.Err() != nil {
			return nil
		}
		return err
	}, nil
}
