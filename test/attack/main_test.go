// Package attack simulates hostile or careless clients, nodes and containers, and checks that the
// cluster refuses them and that other users are not affected. Every test states the cost of the
// attack and the accepted loss of the victim. The lab and this process have limited memory, so that
// a successful attack ends a test and not the machine.
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

func TestMain(m *testing.M) { os.Exit(runOnLab(m)) }

func runOnLab(m *testing.M) int {
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

// guardCluster limits the lab's memory. When the test ends, it checks that the cluster has
// survived: no daemon has exited, the leader is the same, and every replica accepts a write.
func guardCluster(t *testing.T) kubernetes.Interface {
	t.Helper()
	if err := testenv.Lab().LimitMemory(labMemory); err != nil {
		t.Fatal(err)
	}
	before, led := daemonPIDs(t), leaderName(t)
	t.Cleanup(func() {
		if now := leaderName(t); now != led {
			t.Errorf("%s leads, before the attack %s did", now, led)
		}
		for name, pid := range daemonPIDs(t) {
			if before[name] != pid {
				t.Errorf("the daemon of %s is another one than before (pid %d, then %d)", name, before[name], pid)
			}
		}
		for i := 1; i <= replicas; i++ {
			checkWrites(t, fmt.Sprintf("cp%d", i))
		}
	})
	return testenv.Client(t)
}

// leaderName returns the name of the leader.
func leaderName(t *testing.T) string {
	t.Helper()
	var status api.ClusterStatus
	testenv.Eventually(t, soon, func() error {
		raw, err := testenv.Client(t).CoreV1().RESTClient().Get().AbsPath(api.PathClusterStatus).DoRaw(
			context.Background())
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

// daemonPIDs returns the PIDs of all hosts' daemons.
func daemonPIDs(t *testing.T) map[string]int {
	t.Helper()
	out := map[string]int{}
	for _, h := range testenv.Lab().Status(context.Background()) {
		out[h.Name] = h.PID
	}
	return out
}

// checkWrites creates and deletes an object through one replica, on new connections.
func checkWrites(t *testing.T, replica string) {
	t.Helper()
	cs := testenv.ClientAt(t, replica)
	if own, ok := cs.CoreV1().RESTClient().(*rest.RESTClient); ok {
		defer utilnet.CloseIdleConnectionsFor(own.Client.Transport)
	}
	testenv.Eventually(t, soon, func() error {
		ns := "kube-system"
		made, err := cs.CoreV1().ConfigMaps(ns).Create(context.Background(), probeConfigMap(), metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("%s does not serve: %w", replica, err)
		}
		return cs.CoreV1().ConfigMaps(ns).Delete(context.Background(), made.Name, metav1.DeleteOptions{})
	})
}

// residentMemory returns the resident memory of a host's daemon, in bytes.
func residentMemory(t *testing.T, host string) int64 {
	t.Helper()
	for _, h := range testenv.Lab().Status(context.Background()) {
		if h.Name == host {
			return h.RSS
		}
	}
	t.Fatalf("no host %s", host)
	return 0
}

// peakMemory returns the largest resident memory of a host's daemon since clearPeak or its start,
// in bytes.
func peakMemory(t *testing.T, host string) int64 {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(daemonPIDs(t)[host]), "status"))
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
	t.Fatalf("the kernel reports no peak memory of host %s", host)
	return 0
}

// clearPeak resets the value of peakMemory.
func clearPeak(t *testing.T, host string) {
	t.Helper()
	file := filepath.Join("/proc", strconv.Itoa(daemonPIDs(t)[host]), "clear_refs")
	if err := os.WriteFile(file, []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
}
