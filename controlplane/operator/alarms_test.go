package operator

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry"
)

// The alarm lists a bounded number of the objects that cannot be read, and has a remedy.
func TestUnreadableAlarm(t *testing.T) {
	k := kinds.All().ByType(&v1.ConfigMap{})
	var all []registry.Unreadable
	for i := range 7 {
		name := fmt.Sprintf("c%d", i)
		all = append(all, registry.Unreadable{Kind: k, Namespace: "default", Name: name,
			Key:    "/registry/configmaps/default/" + name,
			Reason: "cut short", Seen: time.UnixMilli(int64(2000 - i))})
	}
	a := unreadableAlarm(all)
	if a.Kind != "unreadable" || a.Since != 1994 || !strings.HasPrefix(a.Message, "7 stored objects cannot be read") ||
		!strings.Contains(a.Message, "/registry/configmaps/default/c4 (cut short), and 2 more") ||
		!strings.Contains(a.Remedy, "kubectl delete configmaps c0 -n default") ||
		!strings.HasSuffix(a.Remedy, "; the same for the others") {
		t.Errorf("the alarm is %+v", a)
	}
	all[6].Dropped = "v1"
	const others = "; for the others, get each object ('kubectl get'): the error names its remedy"
	if a := unreadableAlarm(all); !strings.HasSuffix(a.Remedy, others) {
		t.Errorf("the alarm about objects with two remedies is %+v", a)
	}
}
