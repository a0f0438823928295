package operator

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/virtual"
)

// formatComponent returns a component as one line.
func formatComponent(c corev1.ComponentStatus) string {
	condition := c.Conditions[0]
	return strings.TrimSpace(c.Name + " " + string(condition.Status) + " " + condition.Message + condition.Error)
}

// ComponentStatuses are derived from the leader's report about its work and from the status of the
// members. They have the names that tools expect.
func TestComponents(t *testing.T) {
	members := []api.ClusterMember{
		{Name: "cp2", Ready: "yes", Voter: true, Leader: true},
		{Name: "cp1", Ready: "yes", Voter: true},
		{Name: "cp3", Ready: "no: it does not answer: connection refused", Voter: true},
	}
	etcd := []string{"etcd-0 True ok: replica cp1 follows", "etcd-1 True ok: replica cp2 leads",
		"etcd-2 False replica cp3 is not ready: it does not answer: connection refused"}
	silentLeader := []api.ClusterMember{{Name: "cp1", Ready: "yes", Voter: true},
		{Name: "cp2", Ready: "no: it does not answer", Voter: true, Leader: true}}
	for name, c := range map[string]struct {
		status              api.ClusterStatus
		controllers, binder string
		members             []string
	}{
		"all components are healthy": {api.ClusterStatus{Leader: "cp2", Work: api.WorkBegun, Members: members},
			"True ok", "True ok", etcd},
		"a controller fails": {api.ClusterStatus{Leader: "cp2", Work: api.WorkBegun, Members: members,
			Failing: []api.ClusterPart{{Name: "deployment", Error: "boom"}, {Name: "fleet", Error: "bang"}}},
			"False deployment failed and is restarted: boom; fleet failed and is restarted: bang", "True ok", etcd},
		"the scheduler fails": {api.ClusterStatus{Leader: "cp2", Work: api.WorkBegun, Members: members,
			Failing: []api.ClusterPart{{Name: "scheduler", Error: "boom"}}},
			"True ok", "False scheduler failed and is restarted: boom", etcd},
		"the new leader has not started its work": {api.ClusterStatus{Leader: "cp2", Work: api.WorkWaiting,
			Members: members},
			"False replica cp2 leads and has not started its work yet",
			"False replica cp2 leads and has not started its work yet", etcd},
		"the leader does not respond": {api.ClusterStatus{Leader: "cp2", Members: silentLeader},
			"Unknown the leader, replica cp2, does not report its work: it does not answer",
			"Unknown the leader, replica cp2, does not report its work: it does not answer",
			[]string{"etcd-0 True ok: replica cp1 follows",
				"etcd-1 False replica cp2 is not ready: it does not answer"}},
		"there is no leader": {api.ClusterStatus{Members: []api.ClusterMember{{Name: "cp1", Ready: "yes",
			Voter: true}}},
			"False no replica leads", "False no replica leads", []string{"etcd-0 False replica cp1 has no leader"}},
		"a joining replica is catching up": {api.ClusterStatus{Leader: "cp1", Work: api.WorkBegun,
			Members: []api.ClusterMember{{Name: "cp1", Ready: "yes", Leader: true, Voter: true},
				{Name: "cp9", Ready: "yes"}}},
			"True ok", "True ok", []string{"etcd-0 True ok: replica cp1 leads",
				"etcd-1 True ok: replica cp9 is catching up and has no vote yet"}},
	} {
		want := append([]string{"controller-manager " + c.controllers}, append(c.members, "scheduler "+c.binder)...)
		var got []string
		for _, s := range componentStatuses(c.status) {
			got = append(got, formatComponent(s))
		}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("%s:\n got %s\nwant %s", name, strings.Join(got, "\n     "), strings.Join(want, "\n     "))
		}
	}
}

// A part that failed counts as failing until it has run for recoveryTime. A replica that is no
// longer the leader has no parts.
func TestLeaderWork(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var w LeaderWork
		w.RecordFailure("early", errors.New("before the start"), time.Second)
		if begun, failing := w.State(); begun != api.WorkWaiting || len(failing) != 0 {
			t.Errorf("before the start: state %s, failing %v", begun, failing)
		}
		w.RecordStart()
		w.RecordFailure("deployment", errors.New(strings.Repeat("x", 5000)), time.Second)
		w.RecordFailure("fleet", errors.New("bang"), 30*time.Second)
		begun, failing := w.State()
		if begun != api.WorkBegun || len(failing) != 2 || failing[0].Name != "deployment" ||
			len(failing[0].Error) != maxFailureBytes {
			t.Errorf("after two failures: state %s, failing %+v", begun, failing)
		}
		time.Sleep(recoveryTime + 2*time.Second)
		if _, failing = w.State(); len(failing) != 1 || failing[0].Name != "fleet" || failing[0].Error != "bang" {
			t.Errorf("after one part has recovered: failing %+v", failing)
		}
		w.RecordStop()
		if begun, failing := w.State(); begun != api.WorkWaiting || len(failing) != 0 {
			t.Errorf("after the end of the leadership: state %s, failing %v", begun, failing)
		}
	})
}
