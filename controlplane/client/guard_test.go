package client

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestGuardNoticesMutation(t *testing.T) {
	var said []string
	g := &guard{fail: func(what string) { said = append(said, what) }}
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"},
		Data: map[string]string{"k": "v"}}
	g.OnAdd(cm, false)
	g.compareObjects()
	if len(said) != 0 {
		t.Fatalf("before any change: %v", said)
	}
	cm.Data["k"] = "w"
	g.compareObjects()
	if len(said) != 1 || !strings.Contains(said[0], "default/a") {
		t.Fatalf("after a change: %v", said)
	}
}
