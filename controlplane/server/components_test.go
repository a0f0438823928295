package server

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/virtual"
)

// told is a component in a line.
func told(c corev1.ComponentStatus) string {
	is := c.Conditions[0]
	return strings.TrimSpace(c.Name + " " + string(is.Status) + " " + is.Message + is.Error)
}

// What is told of components is what the leader says of its work and what is known of the members, by the names that
// tools look for.
func TestComponents(t *testing.T) {
	members := []api.ClusterMember{
		{Name: "cp2", Ready: "yes", Voter: true, Leader: true},
		{Name: "cp1", Ready: "yes", Voter: true},
		{Name: "cp3", Ready: "no: it does not answer: connection refused", Voter: true},
	}
	etcd := []string{"etcd-0 True ok: replica cp1 follows", "etcd-1 True ok: replica cp2 leads",
		"etcd-2 False replica cp3 is not ready: it does not answer: connection refused"}
	mute := []api.ClusterMember{{Name: "cp1", Ready: "yes", Voter: true}, {Name: "cp2", Ready: "no: it does not answer", Voter: true, Leader: true}}
	for name, c := range map[string]struct {
		status              api.ClusterStatus
		controllers, binder string
		members             []string
	}{
		"well": {api.ClusterStatus{Leader: "cp2", Work: api.WorkBegun, Members: members}, "True ok", "True ok", etcd},
		"a controller fails": {api.ClusterStatus{Leader: "cp2", Work: api.WorkBegun, Members: members,
			Failing: []api.ClusterPart{{Name: "deployment", Error: "boom"}, {Name: "fleet", Error: "bang"}}},
			"False deployment failed and is begun again: boom; fleet failed and is begun again: bang", "True ok", etcd},
		"the scheduler fails": {api.ClusterStatus{Leader: "cp2", Work: api.WorkBegun, Members: members,
			Failing: []api.ClusterPart{{Name: "scheduler", Error: "boom"}}},
			"True ok", "False scheduler failed and is begun again: boom", etcd},
		"a new leader": {api.ClusterStatus{Leader: "cp2", Work: api.WorkWaiting, Members: members},
			"False replica cp2 leads and has not begun its work yet", "False replica cp2 leads and has not begun its work yet", etcd},
		"a silent leader": {api.ClusterStatus{Leader: "cp2", Members: mute},
			"Unknown the leader, replica cp2, does not say how its work goes: it does not answer",
			"Unknown the leader, replica cp2, does not say how its work goes: it does not answer",
			[]string{"etcd-0 True ok: replica cp1 follows", "etcd-1 False replica cp2 is not ready: it does not answer"}},
		"no leader": {api.ClusterStatus{Members: []api.ClusterMember{{Name: "cp1", Ready: "yes", Voter: true}}},
			"False no replica leads", "False no replica leads", []string{"etcd-0 False replica cp1 knows of no leader"}},
		"a newcomer": {api.ClusterStatus{Leader: "cp1", Work: api.WorkBegun, Members: []api.ClusterMember{{Name: "cp1", Ready: "yes", Leader: true, Voter: true}, {Name: "cp9", Ready: "yes"}}},
			"True ok", "True ok", []string{"etcd-0 True ok: replica cp1 leads", "etcd-1 True ok: replica cp9 is catching up and has no vote yet"}},
	} {
		want := append([]string{"controller-manager " + c.controllers}, append(c.members, "scheduler "+c.binder)...)
		var got []string
		for _, s := range componentsOf(c.status) {
			got = append(got, told(s))
		}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("%s:\n got %s\nwant %s", name, strings.Join(got, "\n     "), strings.Join(want, "\n     "))
		}
	}
}

// A part that failed counts as failing until it has run for a while; who no longer leads has no parts.
func TestWork(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var w work
		w.failed("early", errors.New("before there is work"), time.Second)
		if begun, failing := w.state(); begun != api.WorkWaiting || len(failing) != 0 {
			t.Errorf("before: %s, %v", begun, failing)
		}
		w.begin()
		w.failed("deployment", errors.New(strings.Repeat("x", 5000)), time.Second)
		w.failed("fleet", errors.New("bang"), 30*time.Second)
		begun, failing := w.state()
		if begun != api.WorkBegun || len(failing) != 2 || failing[0].Name != "deployment" || len(failing[0].Error) != maxFault {
			t.Errorf("two failed: %s, %+v", begun, failing)
		}
		time.Sleep(mending + 2*time.Second)
		if _, failing = w.state(); len(failing) != 1 || failing[0].Name != "fleet" || failing[0].Error != "bang" {
			t.Errorf("one mended: %+v", failing)
		}
		w.end()
		if begun, failing := w.state(); begun != api.WorkWaiting || len(failing) != 0 {
			t.Errorf("after: %s, %v", begun, failing)
		}
	})
}
