package provision

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/upgrade"
)

func TestReleaseSaid(t *testing.T) {
	release, level, err := parseRelease("keelson-controlplane version v1.2.0\nfeature level 2\n",
		"keelson-agent version v1.2.0\n")
	if err != nil || release != "1.2.0" || level != 2 {
		t.Errorf("%s %d %v", release, level, err)
	}
	for _, c := range []struct{ controlplane, agent, want string }{
		{"keelson-controlplane version v1\n", "", "release v1 is too old to report its feature level"},
		{"keelson-controlplane version v1\nfeature level many\n", "", "is too old to report its feature level"},
		{"usage", "", `printed "usage", which is not a release`},
		{"", "", `printed "", which is not a release`},
		{"keelson-controlplane version v1\nfeature level 2\n", "keelson-agent version v2\n",
			`is of release v1, and keelson-agent reports "keelson-agent version v2": want the same release`},
		{"keelson-controlplane version v1\nfeature level 2\n", "", "want the same release"},
	} {
		if _, _, err := parseRelease(c.controlplane, c.agent); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q, %q: %v; want %s", c.controlplane, c.agent, err, c.want)
		}
	}
}

// What an upgrade goes by: who runs what, who leads, and what is wrong with whom.
func TestStateOfAnUpgrade(t *testing.T) {
	status := api.ClusterStatus{Leader: "cp2", FeatureLevel: 1, Work: api.WorkWaiting,
		Alarms: []api.ClusterAlarm{{Kind: "space", Member: "cp2", Message: "nearly full"},
			{Kind: "diverged", Member: "cp3", Message: "its state differs"}},
		Members: []api.ClusterMember{
			{Name: "cp3", Voter: true, Ready: "yes", Version: "v1"},
			{Name: "cp1", Voter: true, Ready: "no: it does not answer"},
			{Name: "cp2", Voter: true, Ready: "yes", Version: "v2"}}}
	is := func(kind v1.NodeConditionType, status v1.ConditionStatus, message string) v1.NodeCondition {
		return v1.NodeCondition{Type: kind, Status: status, Message: message}
	}
	node := func(name, release, mark string, all ...v1.NodeCondition) v1.Node {
		n := v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{drainMark: mark}}}
		n.Status.NodeInfo.ContainerRuntimeVersion, n.Status.Conditions = release, all
		return n
	}
	good := is(v1.NodeReady, v1.ConditionTrue, "")
	got := upgradeState(status, []v1.Node{
		node("w2", "keelson://2", drainDone+wasCordoned, good, is(v1.NodeNetworkUnavailable, v1.ConditionFalse, "")),
		node("w1", "keelson://v1", drainBegun, is(v1.NodeReady, v1.ConditionUnknown, "its agent is not heard of")),
		node("w3", "", "", good, is("keelson.dev/Degraded", v1.ConditionTrue, "no probes")),
		node("w4", "keelson://2", ""),
	})
	want := upgrade.State{Level: 1, Busy: "the leader's work has not begun",
		Members: []upgrade.Member{{Name: "cp1", Voter: true, Problem: "it does not answer"},
			{Name: "cp2", Release: "2", Voter: true, Leader: true},
			{Name: "cp3", Release: "1", Voter: true, Problem: "its state differs"}},
		Nodes: []upgrade.Node{{Name: "w1", Release: "1", Problem: "it is not Ready: its agent is not heard of"},
			{Name: "w2", Release: "2", Drained: true},
			{Name: "w3", Problem: "keelson.dev/Degraded: no probes"},
			{Name: "w4", Release: "2", Problem: "it does not say whether it is Ready"}}}
	if len(got.Members) != 3 || len(got.Nodes) != 4 || got.Level != want.Level || got.Busy != want.Busy {
		t.Fatalf("%+v", got)
	}
	for i := range want.Members {
		if got.Members[i] != want.Members[i] {
			t.Errorf("%+v, want %+v", got.Members[i], want.Members[i])
		}
	}
	for i := range want.Nodes {
		if got.Nodes[i] != want.Nodes[i] {
			t.Errorf("%+v, want %+v", got.Nodes[i], want.Nodes[i])
		}
	}
}

// A node that took no pods before it was drained takes none afterwards, also when the drain was cut off and begun again.
func TestWhoTookNoPods(t *testing.T) {
	for _, c := range []struct {
		mark     string
		cordoned bool
		want     bool
	}{{"", false, false}, {"", true, true}, {drainBegun, true, false}, {drainBegun + wasCordoned, true, true},
		{drainDone, true, false}, {drainDone + wasCordoned, true, true}} {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{drainMark: c.mark}}}
		n.Spec.Unschedulable = c.cordoned
		if got := cordonedBeforeUpgrade(n); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
