package server

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/nodegateway"
)

// A node that renews its certificate no more is an alarm before the certificate ends, wherever the node has its session; one
// that is within its time is none, nor is one of which only an old connection tells. F51
func TestNotRenewedAlarm(t *testing.T) {
	now := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	cert := func(use string, days, past int, told bool) nodegateway.NodeCertificate {
		begins := now.AddDate(0, 0, -past)
		return nodegateway.NodeCertificate{Use: use, Begins: begins, Expires: begins.AddDate(0, 0, days), Told: told}
	}
	for _, c := range []struct {
		name string
		of   map[string][]nodegateway.NodeCertificate
		want string // of the message; "" = there is no alarm
	}{
		{"none", nil, ""},
		{"new ones", map[string][]nodegateway.NodeCertificate{"w1": {cert("agent", 365, 10, true), cert("serving", 30, 1, true)}}, ""},
		{"about to be renewed", map[string][]nodegateway.NodeCertificate{"w1": {cert("agent", 365, 250, true), cert("serving", 30, 21, true)}}, ""},
		{"an old connection", map[string][]nodegateway.NodeCertificate{"w1": {cert("agent", 365, 400, false)}}, ""},
		{"its own", map[string][]nodegateway.NodeCertificate{"w1": {cert("agent", 365, 300, true), cert("serving", 30, 1, true)}},
			"1 certificates of nodes were not renewed in time: w1 (agent) ends 2026-08-05T00:00:00Z"},
		{"its server's", map[string][]nodegateway.NodeCertificate{"w1": {cert("agent", 365, 10, true), cert("serving", 30, 24, true)}}, "w1 (serving) ends 2026-06-07"},
		{"one that has ended", map[string][]nodegateway.NodeCertificate{"w2": {cert("agent", 365, 300, true)}, "w1": {cert("agent", 365, 366, true)}},
			"w1 (agent) ends 2026-05-31T00:00:00Z, w2 (agent) ends"},
	} {
		got := overdueAlarms(c.of, now)
		if len(got) != min(1, len(c.want)) {
			t.Errorf("%s: %+v", c.name, got)
			continue
		}
		if len(got) == 1 && (!strings.Contains(got[0].Message, c.want) || got[0].Kind != alarmNotRenewed || got[0].Since > now.UnixMilli() ||
			!strings.Contains(got[0].Remedy, "--names w1 --replace")) {
			t.Errorf("%s: %+v, want %q", c.name, got[0], c.want)
		}
	}
	many := map[string][]nodegateway.NodeCertificate{}
	for i := range 5000 {
		many[fmt.Sprintf("w%d", i)] = []nodegateway.NodeCertificate{cert("agent", 365, 300, true)}
	}
	got := overdueAlarms(many, now)
	if len(got) != 1 || !strings.Contains(got[0].Message, "and 4995 more") || len(got[0].Message) > 1000 {
		t.Errorf("of many: %+v", got)
	}

	s := api.ClusterStatus{Members: []api.ClusterMember{{Name: "cp1"}, {Name: "cp2"}}}
	part := &api.ClusterStatus{Answered: "cp2", Members: []api.ClusterMember{{Name: "cp2"}}, Alarms: append(got, api.ClusterAlarm{Kind: "space"})}
	complete(&s, []*api.ClusterStatus{nil, part}, make([]error, 2))
	if len(s.Alarms) != 1 || s.Alarms[0] != got[0] {
		t.Errorf("with what cp2 says there are the alarms %+v", s.Alarms)
	}
}

// Of several replicas' answers the newest certificate of each node and use is shown: others are those with which old
// connections were made. F51
func TestNewestOfNodes(t *testing.T) {
	c := func(holder, use string, begins, expires int64, node bool) api.ClusterCertificate {
		return api.ClusterCertificate{Holder: holder, Use: use, Begins: begins, Expires: expires, Node: node}
	}
	got := newestOfNodes([]api.ClusterCertificate{
		c("cp1", "serving", 1, 9, false), c("cp1", "serving", 2, 8, false),
		c("w1", "agent", 10, 100, true), c("w1", "agent", 20, 90, true), c("w1", "agent", 20, 90, true), // the new one ends sooner
		c("w1", "serving", 5, 6, true), c("w2", "agent", 3, 4, true),
	})
	var rows []string
	for _, c := range got {
		rows = append(rows, fmt.Sprint(c.Holder, " ", c.Use, " ", c.Begins))
	}
	slices.Sort(rows)
	if want := []string{"cp1 serving 1", "cp1 serving 2", "w1 agent 20", "w1 serving 5", "w2 agent 3"}; !slices.Equal(rows, want) {
		t.Errorf("%v, want %v", rows, want)
	}
}
