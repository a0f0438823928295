package addressevents

import (
	"errors"
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// The number of Events about refused addresses is bounded for each node, independently of other
// nodes. The number of recorded refusals is bounded too.
func TestAddressEventsAreBounded(t *testing.T) {
	now := time.Unix(1000, 0)
	var got []string
	e := &Recorder{now: func() time.Time {
		return now
	}, record: func(o api.Object, message string) { got = append(got, o.GetName()+" "+message) }}
	pod := func(node, name string) *v1.Pod {
		return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: v1.PodSpec{NodeName: node}}
	}
	expect := func(step string, want int) {
		t.Helper()
		if len(got) != want {
			t.Errorf("%s: %d Events %q, want %d", step, len(got), got, want)
		}
		got = nil
	}
	for range 1000 {
		e.RecordRefusal(pod("a", "web"), errors.New("same"))
	}
	expect("the same refusal repeatedly", 1)
	for i := range 1000 {
		e.RecordRefusal(pod("a", "web"), fmt.Errorf("another %d", i))
	}
	expect("many refusals of a node", addressEventsBurst-1)
	e.RecordRefusal(pod("b", "web"), errors.New("same"))
	e.RecordRefusal(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}}, errors.New("same"))
	expect("another node", 2)
	now = now.Add(addressEventRepeat)
	e.RecordRefusal(pod("a", "web"), errors.New("same"))
	expect("the same refusal after some time", 1)
	for i := range 3 * addressEventNodes {
		e.RecordRefusal(pod(fmt.Sprint("n", i), "web"), errors.New("same"))
	}
	if len(e.nodes) > addressEventNodes {
		t.Errorf("%d nodes are recorded", len(e.nodes))
	}
	now = now.Add(addressEventRepeat)
	got = nil
	e.RecordRefusal(pod("late", "web"), errors.New("same"))
	expect("a node after many others", 1)
}
