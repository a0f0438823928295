// Package shared asks the API at the address that the replicas of a lab share, while its leaders are lost.
package shared

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv"
)

const (
	address  = "10.89.0.200" // of the lab's link, and of no host
	flag     = "--api-address-shared=" + address
	patience = 3 * time.Minute
)

func TestMain(m *testing.M) { os.Exit(testenv.MainWith([]string{flag}, "", m)) }

// The API is called at the shared address from a worker while the leader is killed, frozen, cut off
// and stopped gracefully. It responds again each time, from another replica. A lost replica's host
// loses the address, and a stopped replica removes it.
func TestAddressFollowsTheLeader(t *testing.T) {
	if flags := testenv.Lab().Config.ControlPlaneFlags; len(flags) == 0 || flags[0] != flag {
		t.Skipf("the lab that is up has no %s", flag)
	}
	w1 := testenv.Host(t, "w1")
	cfg := testenv.RestConfig(t)
	tlsCfg, err := rest.TLSConfigFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ask := func() error { // each by a connection of its own
		web := http.Client{Timeout: 500 * time.Millisecond,
			Transport: &http.Transport{TLSClientConfig: tlsCfg, DisableKeepAlives: true,
				DialContext: func(ctx context.Context, _, at string) (net.Conn, error) { return w1.Dial(ctx, at) }}}
		resp, err := web.Get("https://" + net.JoinHostPort(address, "6443") + "/readyz")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return nil
	}
	testenv.Eventually(t, patience, ask)
	lab := testenv.Lab()
	gap := map[string]time.Duration{}
	for _, f := range []struct {
		name     string
		do, undo func(string) error
	}{
		{"kill -9", func(h string) error {
			return lab.KillDaemon(t.Context(), h)
		}, func(h string) error { return lab.Restart(t.Context(), h) }},
		{"freeze", lab.Pause, lab.Resume},
		{"cut off", lab.Partition, lab.Heal},
		{"stop", func(h string) error {
			return stopDuringRequest(t, h, tlsCfg)
		}, func(h string) error { return lab.Restart(t.Context(), h) }},
	} {
		leader, _ := testenv.Leader(t, patience)
		testenv.Eventually(t, patience, func() error { return requireOnlyLeader(t, leader) })
		var answers responseGaps
		ctx, stop := context.WithCancel(t.Context())
		var asking sync.WaitGroup
		asking.Go(func() {
			for wait.Delay(ctx, 5*time.Millisecond) == nil {
				answers.recordResult(ask())
			}
		})
		testenv.Eventually(t, patience, func() error {
			if n := answers.countSince(time.Time{}); n < 20 {
				return fmt.Errorf("%d answers", n)
			}
			return nil
		})
		began := time.Now()
		if err := f.do(leader); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, func() error {
			if n := answers.countSince(began); n < 50 {
				return fmt.Errorf("%d answers since", n)
			}
			return requireAddress(t, leader, false)
		})
		alone := time.Since(began)
		if err := f.undo(leader); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, func() error {
			now, _ := testenv.Leader(t, patience)
			return requireOnlyLeader(t, now)
		})
		stop()
		asking.Wait()
		gap[f.name] = answers.longest
		t.Logf("%s of %s: no response for %s, %d requests failed; after %s only the new leader had the address",
			f.name, leader,
			answers.longest.Round(time.Millisecond), answers.failed, alone.Round(time.Millisecond))
	}
	if gap["stop"] > gap["freeze"] {
		t.Errorf("a leader that is stopped in good order is missed for %s, one that hangs for %s",
			gap["stop"], gap["freeze"])
	}
	leader, _ := testenv.Leader(t, patience)
	if err := lab.Stop(t.Context(), leader); err != nil {
		t.Fatal(err)
	}
	if err := requireAddress(t, leader, false); err != nil {
		t.Errorf("after a stop in good order: %v", err)
	}
	if err := lab.Restart(t.Context(), leader); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, ask)
}

// stopDuringRequest stops the leader during a request at the shared address that lasts for hours,
// such as one that follows a log. The request ends when another replica leads.
func stopDuringRequest(t *testing.T, leader string, tlsCfg *tls.Config) error {
	t.Helper()
	w1 := testenv.Host(t, "w1")
	body, send := io.Pipe()
	web := http.Client{Transport: &http.Transport{TLSClientConfig: tlsCfg,
		DialContext: func(ctx context.Context, _, at string) (net.Conn, error) { return w1.Dial(ctx, at) }}}
	var held sync.WaitGroup
	defer held.Wait()
	defer send.Close()
	held.Go(func() {
		resp, err := web.Post("https://"+net.JoinHostPort(address, "6443")+"/api/v1/namespaces/default/configmaps",
			"application/json", body)
		if err != nil {
			body.CloseWithError(err)
			return
		}
		resp.Body.Close()
	})
	if _, err := io.WriteString(send, "{"); err != nil {
		return fmt.Errorf("a request at the shared address: %w", err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- testenv.Lab().Stop(t.Context(), leader) }()
	testenv.Eventually(t, patience, func() error {
		if now, _ := testenv.Leader(t, patience); now == leader {
			return fmt.Errorf("%s leads still", leader)
		}
		return nil
	})
	send.Close()
	return <-stopped
}

// requireAddress returns an error unless the host has the address, or lacks it, as wanted.
func requireAddress(t *testing.T, host string, want bool) error {
	t.Helper()
	// Not as a process of the host, which may be frozen.
	out, err := exec.CommandContext(t.Context(), "nsenter", "--net="+testenv.Host(t, host).NetNS(), "ip", "-4",
		"address").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if got := strings.Contains(string(out), address+"/32"); got != want {
		return fmt.Errorf("host %s has the shared address: %v, want %v", host, got, want)
	}
	return nil
}

// requireOnlyLeader returns an error unless only this replica has the address.
func requireOnlyLeader(t *testing.T, leader string) error {
	t.Helper()
	for _, r := range testenv.Replicas() {
		if err := requireAddress(t, r, r == leader); err != nil {
			return err
		}
	}
	return nil
}

// responseGaps records the times without a response.
type responseGaps struct {
	mu      sync.Mutex
	last    time.Time
	times   []time.Time
	longest time.Duration
	failed  int
}

func (g *responseGaps) recordResult(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err != nil {
		g.failed++
		return
	}
	now := time.Now()
	if !g.last.IsZero() {
		g.longest = max(g.longest, now.Sub(g.last))
	}
	g.last, g.times = now, append(g.times, now)
}

func (g *responseGaps) countSince(t time.Time) (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, at := range g.times {
		if at.After(t) {
			n++
		}
	}
	return n
}
