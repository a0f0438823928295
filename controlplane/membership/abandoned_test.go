package membership_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// Two of three replicas are abandoned by a recovery and start again with their data. They find the
// recovered replica, stop serving and raise an alarm, and so does the recovered cluster. After a
// rebuild they are members again. F53
func TestAbandonedReplicasStopServing(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.PutConfigMap("cp3", "a")
	for _, name := range []string{"cp3", "cp2", "cp1"} {
		_ = p.Members[name].Stop()
	}
	lost, err := recovery.Recover(p.Members["cp1"].Config.Dir(), true)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(lost.Members); got != "[cp2 cp3]" {
		t.Errorf("the recovery abandons %s, want [cp2 cp3]", got)
	}
	p.Restart("cp1")
	// cp3 was stopped before it had caught up the first time.
	joiningMark := filepath.Join(p.Members["cp3"].Config.DataDir, datadir.NewMemberFile)
	if err := datadir.WriteJSON(joiningMark, map[string]string{"cp1": datadir.HostPort(servertest.Address(1),
		p.Cluster.PeerPort)}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"cp2", "cp3"} { // together a majority of their last known members
		p.StartReplica(p.Members[name].Config)
	}
	for _, name := range []string{"cp2", "cp3"} {
		p.awaitAbandoned(t, name)
	}
	p.PutConfigMap("cp1", "recovered")
	servertest.Eventually(t, func() error { return checkAbandonedAlarms(p.ClusterStatus("cp1"), "cp2", "cp3") })

	// The record survives a restart while the recovered cluster cannot be reached.
	p.StopReplica("cp1")
	p.StopReplica("cp2")
	p.StartReplica(p.Members["cp2"].Config)
	p.awaitAbandoned(t, "cp2")
	p.Restart("cp1")
	servertest.Eventually(t, func() error { return checkAbandonedAlarms(p.ClusterStatus("cp1"), "cp2", "cp3") })

	for _, name := range []string{"cp2", "cp3"} {
		p.StopReplica(name)
		if _, err := recovery.Rebuild(p.Members[name].Config.Dir(), []string{servertest.Address(1)}); err != nil {
			t.Fatal(err)
		}
		p.Restart(name)
		p.CheckConfigMaps(name, "a", "recovered")
	}
	for name := range p.Members {
		servertest.Eventually(t, func() error {
			if s := p.ClusterStatus(name); len(s.Alarms) > 0 || len(s.Members) != 3 {
				return fmt.Errorf("after the rebuilds %s reports alarms %+v and members %+v", name, s.Alarms, s.Members)
			}
			return nil
		})
	}
}

// awaitAbandoned waits until a replica serves its status with an alarm that it is abandoned, and
// checks that it refuses a write.
func (p *plane) awaitAbandoned(t *testing.T, name string) {
	t.Helper()
	servertest.Eventually(t, func() error {
		var s api.ClusterStatus
		if err := p.Call(name, "GET", api.PathClusterStatus, nil, &s); err != nil {
			return err
		}
		return checkAbandonedAlarms(s, name)
	})
	_, err := p.CreateConfigMap(name, "split-brain")
	if err == nil || !strings.Contains(err.Error(), "abandoned") || !strings.Contains(err.Error(), "rebuild") {
		t.Errorf("a write at the abandoned replica %s: %v", name, err)
	}
}

// checkAbandonedAlarms returns an error unless a status has an alarm for each of these abandoned
// replicas, and for no other replica.
func checkAbandonedAlarms(s api.ClusterStatus, names ...string) error {
	var got []string
	for _, a := range s.Alarms {
		if a.Kind == "abandoned" && strings.Contains(a.Remedy, "rebuild") {
			got = append(got, a.Member)
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(names) {
		return fmt.Errorf("%s has alarms %+v, want alarms about the abandoned replicas %v", s.Answered, s.Alarms, names)
	}
	return nil
}

// A backup is restored at one replica while the others run with their data. They stop serving when
// the restored replica starts, and both sides raise the alarm. F53
func TestRestoreAbandonsTheOthers(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.PutConfigMap("cp1", "a")
	file := p.Backup("cp1")
	p.PutConfigMap("cp1", "later")
	p.StopReplica("cp1")
	servertest.Eventually(t, func() error { _, err := p.CreateConfigMap("cp2", "without-cp1"); return err })
	r, err := recovery.Restore(p.Members["cp1"].Config.Dir(), file,
		recovery.RestoreOptions{Replace: true, LeaveOthers: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Abandoned) != 2 || r.Abandoned["cp2"] == "" || r.Abandoned["cp3"] == "" {
		t.Errorf("the restore abandons %v, want cp2 and cp3", r.Abandoned)
	}
	p.Restart("cp1")
	p.awaitAbandoned(t, "cp2")
	p.awaitAbandoned(t, "cp3")
	servertest.Eventually(t, func() error { return checkAbandonedAlarms(p.ClusterStatus("cp1"), "cp2", "cp3") })
	p.PutConfigMap("cp1", "later")
	first := p.ClusterStatus("cp1").Incarnation

	// Restored again, the cluster has a later identity, and the abandoned replicas are still known.
	p.Restore("cp1", file)
	servertest.Eventually(t, func() error { return checkAbandonedAlarms(p.ClusterStatus("cp1"), "cp2", "cp3") })
	if again := p.ClusterStatus("cp1").Incarnation; first == 0 || again <= first {
		t.Errorf("incarnation %d after the second restore, %d after the first", again, first)
	}
}
