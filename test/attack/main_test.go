// Package attack holds what hostile or careless clients, nodes and containers do to a cluster, and what must come of
// it: an answer to them, and nothing to anybody else. Every test says what it costs the attacker and what the victim
// may lose. The lab and this process have bounded memory, so that an attack that succeeds ends a test and not the
// machine.
package attack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

const (
	labMemory = 8 << 30 // of all hosts of the lab together
	ownMemory = 4 << 30 // of this process
	soon      = 2 * time.Minute
	replicas  = 3
	megabyte  = 1 << 20
	ownCgroup = "keelson-attack"
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	os.Unsetenv("GOGC") // the daemons of the lab inherit the environment, and adjust the limit only without GOGC
	if os.Geteuid() == 0 {
		release, err := lab.LimitOwnMemory(ownCgroup, ownMemory)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() {
			if err := release(); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}()
	}
	return testenv.Main(m)
}

// begin bounds the lab's memory and checks, when the test ends, that the cluster has outlived it: no daemon has
// ended, the leader is the same, and every replica serves a write.
func begin(t *testing.T) kubernetes.Interface {
	t.Helper()
	if err := testenv.Lab().LimitMemory(labMemory); err != nil {
		t.Fatal(err)
	}
	before, led := daemons(t), leader(t)
	t.Cleanup(func() {
		if now := leader(t); now != led {
			t.Errorf("%s leads, before the attack %s did", now, led)
		}
		for name, pid := range daemons(t) {
			if before[name] != pid {
				t.Errorf("the daemon of %s is another one than before (pid %d, then %d)", name, before[name], pid)
			}
		}
		for i := 1; i <= replicas; i++ {
			serves(t, fmt.Sprintf("cp%d", i))
		}
	})
	return testenv.Client(t)
}

// leader is the name of the replica that leads.
func leader(t *testing.T) string {
	t.Helper()
	var status api.ClusterStatus
	testenv.Eventually(t, soon, func() error {
		raw, err := testenv.Client(t).CoreV1().RESTClient().Get().AbsPath(api.PathClusterStatus).DoRaw(context.Background())
		if err != nil {
			return err
		}
		if err := json.Unmarshal(raw, &status); err != nil {
			return err
		}
		if status.Leader == "" {
			return errors.New("no replica leads")
		}
		return nil
	})
	return status.Leader
}

// daemons are the pids of all hosts' daemons.
func daemons(t *testing.T) map[string]int {
	t.Helper()
	out := map[string]int{}
	for _, h := range testenv.Lab().Status(context.Background()) {
		out[h.Name] = h.PID
	}
	return out
}

// serves writes and removes an object through one replica, on connections of its own.
func serves(t *testing.T, replica string) {
	t.Helper()
	cs := testenv.ClientAt(t, replica)
	if own, ok := cs.CoreV1().RESTClient().(*rest.RESTClient); ok {
		defer utilnet.CloseIdleConnectionsFor(own.Client.Transport)
	}
	testenv.Eventually(t, soon, func() error {
		ns := "kube-system"
		made, err := cs.CoreV1().ConfigMaps(ns).Create(context.Background(), proof(), metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("%s does not serve: %w", replica, err)
		}
		return cs.CoreV1().ConfigMaps(ns).Delete(context.Background(), made.Name, metav1.DeleteOptions{})
	})
}

// resident is the resident memory of a host's daemon, in bytes.
func resident(t *testing.T, host string) int64 {
	t.Helper()
	for _, h := range testenv.Lab().Status(context.Background()) {
		if h.Name == host {
			return h.RSS
		}
	}
	t.Fatalf("no host %s", host)
	return 0
}

// peak is the largest resident memory that a host's daemon has had, in bytes, since clearPeak or its start.
func peak(t *testing.T, host string) int64 {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(daemons(t)[host]), "status"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if kib, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			n, err := strconv.ParseInt(strings.Fields(kib)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatalf("the kernel tells no peak of host %s", host)
	return 0
}

// clearPeak lets peak begin anew.
func clearPeak(t *testing.T, host string) {
	t.Helper()
	file := filepath.Join("/proc", strconv.Itoa(daemons(t)[host]), "clear_refs")
	if err := os.WriteFile(file, []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
}
