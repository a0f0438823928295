package serviceaccount

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestPlan(t *testing.T) {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns"}}
	going := ns.DeepCopy()
	going.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	ca := func(data map[string]string) *corev1.ConfigMap { return &corev1.ConfigMap{Data: data} }
	good := ca(map[string]string{"ca.crt": "PEM"})
	for _, c := range []struct {
		name    string
		ns      *corev1.Namespace
		account bool
		ca      *corev1.ConfigMap
		want    string // account, create, update
	}{
		{"new", ns, false, nil, "true true false"},
		{"complete", ns, true, good, "false false false"},
		{"account lost", ns, false, good, "true false false"},
		{"certificate changed by someone", ns, true, ca(map[string]string{"ca.crt": "other"}), "false false true"},
		{"something was added", ns, true, ca(map[string]string{"ca.crt": "PEM", "x": "y"}), "false false true"},
		{"going", going, false, nil, "false false false"},
	} {
		n := Plan(c.ns, c.account, c.ca, "PEM")
		if got := fmt.Sprint(n.Account != nil, n.Create != nil, n.Update != nil); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		for _, m := range []*corev1.ConfigMap{n.Create, n.Update} {
			if m != nil && (len(m.Data) != 1 || m.Data["ca.crt"] != "PEM") {
				t.Errorf("%s: data %v", c.name, m.Data)
			}
		}
	}
}
