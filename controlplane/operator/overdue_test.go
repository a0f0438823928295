package operator

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// A node that does not renew its certificates raises an alarm before they expire, on whichever
// replica it has its session. A certificate that is not due raises no alarm, and neither does a
// certificate that only an old connection reports. F51
func TestOverdueAlarms(t *testing.T) {
	now := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	cert := func(node, use string, days, past int, reported bool) NodeCertificate {
		starts := now.AddDate(0, 0, -past)
		c := NodeCertificate{Node: node, Use: use, Starts: starts, Expires: starts.AddDate(0, 0, days),
			Reported: reported}
		c.Renewal = starts.Add(c.Expires.Sub(starts) / 3 * 2)
		return c
	}
	for _, c := range []struct {
		name string
		all  []NodeCertificate
		want string // part of the message; "" = no alarm
	}{
		{"no certificates", nil, ""},
		{"new certificates", []NodeCertificate{cert("w1", "agent", 365, 10, true), cert("w1", "serving", 30, 1, true)},
			""},
		{"certificates that are due for renewal", []NodeCertificate{cert("w1", "agent", 365, 250, true),
			cert("w1", "serving", 30, 21, true)}, ""},
		{"an expired certificate of an old connection", []NodeCertificate{cert("w1", "agent", 365, 400, false)}, ""},
		{"an overdue client certificate", []NodeCertificate{cert("w1", "agent", 365, 300, true),
			cert("w1", "serving", 30, 1, true)},
			"1 certificates of nodes were not renewed in time: w1 (agent) expires 2026-08-05T00:00:00Z"},
		{"an overdue serving certificate", []NodeCertificate{cert("w1", "agent", 365, 10, true),
			cert("w1", "serving", 30, 24, true)},
			"w1 (serving) expires 2026-06-07"},
		{"an expired certificate", []NodeCertificate{cert("w2", "agent", 365, 300, true),
			cert("w1", "agent", 365, 366, true)},
			"w1 (agent) expires 2026-05-31T00:00:00Z, w2 (agent) expires"},
	} {
		got := overdueAlarms(c.all, now)
		if len(got) != min(1, len(c.want)) {
			t.Errorf("%s: the alarms are %+v, want an alarm with %q", c.name, got, c.want)
			continue
		}
		if len(got) == 1 && (!strings.Contains(got[0].Message, c.want) || got[0].Kind != alarmNotRenewed ||
			got[0].Since > now.UnixMilli() ||
			!strings.Contains(got[0].Remedy, "--names w1 --replace")) {
			t.Errorf("%s: the alarm is %+v, want %q", c.name, got[0], c.want)
		}
	}
	var many []NodeCertificate
	for i := range 5000 {
		many = append(many, cert(fmt.Sprintf("w%d", i), "agent", 365, 300, true))
	}
	got := overdueAlarms(many, now)
	if len(got) != 1 || !strings.Contains(got[0].Message, "and 4995 more") || len(got[0].Message) > 1000 {
		t.Errorf("the alarm about 5000 certificates is %+v", got)
	}

	s := api.ClusterStatus{Members: []api.ClusterMember{{Name: "cp1"}, {Name: "cp2"}}}
	part := &api.ClusterStatus{Answered: "cp2", Members: []api.ClusterMember{{Name: "cp2"}},
		Alarms: append(got, api.ClusterAlarm{Kind: "space"})}
	addReports(&s, []*api.ClusterStatus{nil, part}, make([]error, 2))
	if len(s.Alarms) != 1 || s.Alarms[0] != got[0] {
		t.Errorf("with the report of cp2 the alarms are %+v", s.Alarms)
	}
}

// Of the reports of several replicas, only the newest certificate of each node and use is listed.
// The others are certificates with which old connections were made. F51
func TestNewestNodeCertificates(t *testing.T) {
	c := func(holder, use string, begins, expires int64, node bool) api.ClusterCertificate {
		return api.ClusterCertificate{Holder: holder, Use: use, Begins: begins, Expires: expires, Node: node}
	}
	got := newestNodeCertificates([]api.ClusterCertificate{
		c("cp1", "serving", 1, 9, false), c("cp1", "serving", 2, 8, false),
		// the newer certificate expires sooner
		c("w1", "agent", 10, 100, true), c("w1", "agent", 20, 90, true), c("w1", "agent", 20, 90, true),
		c("w1", "serving", 5, 6, true), c("w2", "agent", 3, 4, true),
	})
	var rows []string
	for _, c := range got {
		rows = append(rows, fmt.Sprint(c.Holder, " ", c.Use, " ", c.Begins))
	}
	slices.Sort(rows)
	if want := []string{"cp1 serving 1", "cp1 serving 2", "w1 agent 20", "w1 serving 5",
		"w2 agent 3"}; !slices.Equal(rows, want) {
		t.Errorf("the listed certificates are %v, want %v", rows, want)
	}
}
