package engine_test

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

func TestFinalizers(t *testing.T) {
	going := &metav1.Time{Time: time.Unix(1, 0)}
	for _, c := range []struct {
		name    string
		have    []string
		deleted *metav1.Time
		inUse   bool
		want    string
	}{
		{"marked at birth", []string{"other"}, nil, false, "[other m] true"},
		{"marked already", []string{"m"}, nil, false, "[m] false"},
		{"deleted and in use", []string{"m", "other"}, going, true, "[m other] false"},
		{"deleted and free", []string{"m", "other"}, going, false, "[other] true"},
		{"deleted, never marked", []string{"other"}, going, true, "[other] false"},
	} {
		want, changed := engine.DesiredFinalizers(&metav1.ObjectMeta{Finalizers: c.have, DeletionTimestamp: c.deleted},
			"m", c.inUse)
		if got := fmt.Sprint(want, changed); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}
