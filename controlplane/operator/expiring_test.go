package operator

import (
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// The status has an alarm with a remedy for each CA that expires soon.
func TestExpiringAlarms(t *testing.T) {
	now := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	day := func(n int) int64 { return now.AddDate(0, 0, n).Unix() }
	out := expiringAlarms([]api.ClusterCertificate{
		{Use: UseCluster, Holder: "cp1", Authority: true, Signs: true, Expires: day(91)},
		{Use: UseServing, Holder: "cp1", Expires: day(1)},
		{Use: UsePeers, Holder: "cp1", Authority: true, Signs: true, Expires: day(89), Subject: "new"},
		{Use: UsePeers, Holder: "cp1", Authority: true, Expires: day(-1), Subject: "old"},
		{Use: UseCluster, Holder: "cp1", Authority: true, Signs: true, Expires: day(2), Subject: "ca"},
	}, now)
	if len(out) != 3 || !strings.Contains(out[0].Message, "new") ||
		!strings.Contains(out[0].Remedy, "peer-ca create") ||
		!strings.Contains(out[1].Message, "old") || !strings.Contains(out[1].Remedy, "prune") ||
		!strings.Contains(out[2].Remedy, "rotate cluster-ca") {
		t.Errorf("the alarms are %+v", out)
	}
}
