// Package members changes the members of a lab of three replicas and a standby while it serves: a
// replica is lost and the standby replaces it, and the cluster CA is rotated.
package members

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
	"keelson.dev/keelson/test/testenv/stream"
)

const (
	replaceFlag = "--replace-dead-after=30s"
	patience    = 4 * time.Minute
)

func TestMain(m *testing.M) {
	os.Exit(testenv.MainOn(func(c *lab.Config) {
		c.Standbys, c.Workers, c.ControlPlaneFlags = 1, 2, []string{replaceFlag}
	}, m))
}

func requireStandby(t *testing.T) {
	t.Helper()
	if c := testenv.Lab().Config; c.Standbys != 1 || !slices.Contains(c.ControlPlaneFlags, replaceFlag) {
		t.Skipf("the lab that is up has no standby and no %s", replaceFlag)
	}
}

func clusterStatus(t *testing.T) (s api.ClusterStatus, err error) {
	t.Helper()
	out, err := runKctl(t, "cluster", "status", "-o", "json")
	if err != nil {
		return s, fmt.Errorf("%w: %s", err, out)
	}
	return s, json.Unmarshal([]byte(out), &s)
}

func runKctl(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return testenv.Try(t, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), args...)
}

// findMember returns a member by its name.
func findMember(s api.ClusterStatus, name string) (api.ClusterMember, bool) {
	i := slices.IndexFunc(s.Members, func(m api.ClusterMember) bool { return m.Name == name })
	if i < 0 {
		return api.ClusterMember{}, false
	}
	return s.Members[i], true
}

// A voter's process is killed and stays down. Writes, reads and watches at the other three continue
// without a failure, and after half a minute the standby is a voter. The dead replica, started
// again with its disk, reports that it was removed and why, and changes nothing; joined again it is
// a standby. F53
func TestADeadReplicaIsReplaced(t *testing.T) {
	requireStandby(t)
	var s api.ClusterStatus
	testenv.Eventually(t, patience, func() (err error) {
		if s, err = clusterStatus(t); err != nil {
			return err
		}
		if m, ok := findMember(s, "cp4"); !ok || m.Voter || !m.Standby || m.Ready != "yes" {
			return fmt.Errorf("the standby is %+v", m)
		}
		if !slices.ContainsFunc(s.Members, func(m api.ClusterMember) bool { return m.Leader }) {
			return errors.New("nobody leads")
		}
		return nil
	})
	// init's files are cp1's
	i := slices.IndexFunc(s.Members, func(m api.ClusterMember) bool { return m.Voter && !m.Leader && m.Name != "cp1" })
	dead := s.Members[i].Name
	load := &stream.Load{Clients: map[string]kubernetes.Interface{}, Namespace: testenv.Namespace(t),
		Call: 20 * time.Second}
	for _, name := range testenv.Replicas() {
		load.Names = append(load.Names, name)
		load.Clients[name] = testenv.ClientAt(t, name)
	}
	ctx, end := context.WithCancel(t.Context())
	defer load.Wait()
	defer end()
	if err := load.Start(ctx); err != nil {
		t.Fatal(err)
	}
	load.ExpectLoss(dead)
	killed := time.Now()
	if err := testenv.Lab().KillDaemon(ctx, dead); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		s, err := clusterStatus(t)
		if err != nil {
			return err
		}
		if m, _ := findMember(s, "cp4"); !m.Voter || len(s.Members) != 3 || s.Autopilot == nil ||
			len(s.Autopilot.Done) != 1 {
			return fmt.Errorf("members %+v, autopilot %+v", s.Members, s.Autopilot)
		}
		return nil
	})
	t.Logf("%s was replaced %.1f s after its death", dead, time.Since(killed).Seconds())
	testenv.Eventually(t, patience, func() error { // remaining problems are checked periodically
		said, err := runKctl(t, "cluster", "status")
		if err != nil || !strings.Contains(said, "cp4 has the vote of "+dead+" since ") ||
			!strings.Contains(said, "replaces a voter that has not answered for 30s; every voter answers; "+
				"there is no standby") {
			return fmt.Errorf("%v\n%s", err, said)
		}
		return nil
	})
	restartMember(t, dead)
	seen, err := load.Finish(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", seen)
	if err := seen.Err(); err != nil {
		t.Error(err)
	}
	rejoinEmpty(t, dead)
}

// restartMember starts the dead replica again with its data.
func restartMember(t *testing.T, dead string) {
	t.Helper()
	others := slices.DeleteFunc([]string{"cp1", "cp2", "cp3", "cp4"}, func(name string) bool { return name == dead })
	before := map[string]int{}
	for _, name := range others {
		before[name] = len(logOf(t, name))
	}
	if err := testenv.Lab().RestartDaemon(t.Context(), dead); err != nil {
		t.Fatal(err)
	}
	want := "replica " + dead + " was removed from the raft cluster at "
	testenv.Eventually(t, patience, func() error {
		if !strings.Contains(logOf(t, dead), want) {
			return errors.New("it does not say that it was removed")
		}
		return nil
	})
	if after, err := clusterStatus(t); err != nil || after.Leader == dead || len(after.Members) != 3 {
		t.Errorf("with %s back %s leads %d members, %v", dead, after.Leader, len(after.Members), err)
	}
	// On a busy machine leaders may change by themselves, but no leader steps down for this
	// replica.
	for _, name := range others {
		for line := range strings.Lines(logOf(t, name)[before[name]:]) {
			if strings.Contains(line, "role changed") &&
				(strings.Contains(line, dead+" asks for votes") || strings.Contains(line, dead+" is in term")) {
				t.Errorf("%s gives way to %s: %s", name, dead, line)
			}
		}
	}
}

func logOf(t *testing.T, name string) string {
	t.Helper()
	raw, err := os.ReadFile(testenv.Host(t, name).LogFile())
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// rejoinEmpty makes the dead replica join again with an empty data folder, as its last log line
// requests.
func rejoinEmpty(t *testing.T, dead string) {
	t.Helper()
	if err := testenv.Lab().Stop(t.Context(), dead); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(testenv.Host(t, dead).DataDir(), "controlplane")
	if err := os.Rename(data, data+".aside"); err != nil {
		t.Fatal(err)
	}
	token := strings.TrimSpace(testenv.Kctl(t, "cluster", "token", "create", "--role", "controlplane"))
	h, first := testenv.Host(t, dead), testenv.Host(t, "cp1")
	join := h.Command(t.Context(), filepath.Join(testenv.Lab().Config.BinDir, "keelson-controlplane"), "join",
		"--standby", "--name="+dead,
		"--advertise-address="+h.IP.String(), "--token="+token, "--server="+first.Endpoint(lab.FleetPort))
	if out, err := join.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := testenv.Lab().Restart(t.Context(), dead); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		s, err := clusterStatus(t)
		if err != nil {
			return err
		}
		if m, ok := findMember(s, dead); !ok || m.Voter || !m.Standby || m.Ready != "yes" || s.Autopilot == nil ||
			!strings.Contains(s.Autopilot.State, dead+" would be promoted next") {
			return fmt.Errorf("%+v, autopilot %+v", m, s.Autopilot)
		}
		return nil
	})
}
