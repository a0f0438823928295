package decodelimits

import (
	"errors"
	"fmt"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// repeatedField returns a message with n empty messages in the field inner, within the field outer.
func repeatedField(outer, inner protowire.Number, n int) []byte {
	var spec []byte
	for range n {
		spec = protowire.AppendTag(spec, inner, protowire.BytesType)
		spec = protowire.AppendBytes(spec, nil)
	}
	out := protowire.AppendTag(nil, outer, protowire.BytesType)
	return protowire.AppendBytes(out, spec)
}

func TestHostileProtobuf(t *testing.T) {
	many := &corev1.ConfigMap{Data: map[string]string{}}
	for i := range MaxValues {
		many.Data[fmt.Sprint(i)] = ""
	}
	members, err := many.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		data []byte
		into any
	}{
		"containers":       {repeatedField(2, 2, 1<<20), &corev1.Pod{}},
		"owners":           {repeatedField(1, 13, 1<<20), &corev1.Pod{}},
		"finalizers":       {repeatedField(1, 14, 1<<20), &corev1.Pod{}},
		"members of a map": {members, &corev1.ConfigMap{}},
		"unknown fields":   {repeatedField(2, 1000, 1<<20), &corev1.Pod{}},
	} {
		if err := CheckProto(c.data, c.into); !errors.Is(err, ErrTooMuch) {
			t.Errorf("%s: %v", name, err)
		}
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{"a": "b"}}}
	for range 100 {
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: "c", Env: make([]corev1.EnvVar, 100)})
	}
	data, err := pod.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if err := CheckProto(data, pod); err != nil {
		t.Error(err)
	}
	for _, broken := range [][]byte{nil, data[:len(data)/2], []byte("\xff\xff\xff"), []byte("nonsense")} {
		if err := CheckProto(broken, pod); err != nil {
			t.Errorf("%.10q: %v", broken, err)
		}
	}
}
