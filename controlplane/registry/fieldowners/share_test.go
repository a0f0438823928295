package fieldowners

import (
	"fmt"
	goruntime "runtime"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// BenchmarkFieldForm measures the forms of stored managedFields: the stored bytes of a pod,
// encoding and decoding.
func BenchmarkFieldForm(b *testing.B) {
	table := kinds.All()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", Labels: map[string]string{"app": "hello"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "registry.lab/hello:1",
			Ports: []corev1.ContainerPort{{ContainerPort: 8080}},
			Env:   []corev1.EnvVar{{Name: "A", Value: "1"}, {Name: "B", Value: "2"}},
		}}},
	}
	k := table.ByType(p)
	k.Writes.Default(p)
	setEntries(NewTracker(api.Scheme(), table), &KindState{}, k, p)
	set := p.ManagedFields[0].FieldsV1.Raw
	text, _ := encodeSet(nil, set)
	b.Run("write", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, ok := encodeSet(nil, set); !ok {
				b.Fatal("it does not fit")
			}
		}
		b.ReportMetric(float64(len(set)), "long-bytes")
		b.ReportMetric(float64(len(text)), "short-bytes")
	})
	b.Run("read", func(b *testing.B) {
		b.ReportAllocs()
		var out []byte
		for b.Loop() {
			var err error
			if out, err = decodeSet(out[:0], text); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// An unused field set is freed.
func TestSetShareFreesSets(t *testing.T) {
	s := NewSetShare()
	for i := range 100 {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}}
		p.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "m", FieldsType: typeFieldsV1,
			FieldsV1: &metav1.FieldsV1{Raw: fmt.Appendf(nil, `{"f:%d":{}}`, i)}}}
		s.ShareFields(p)
	}
	deadline := time.Now().Add(10 * time.Second)
	for left := -1; left != 0; {
		if time.Now().After(deadline) {
			t.Fatalf("%d sets of 100 are kept", left)
		}
		goruntime.GC()
		s.mu.Lock()
		left = len(s.sets)
		s.mu.Unlock()
		goruntime.Gosched()
	}
}
