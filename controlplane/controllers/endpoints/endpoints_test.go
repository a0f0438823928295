package endpoints

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func pod(n int, ready bool, port int32) *corev1.Pod {
	ip := fmt.Sprintf("10.244.%d.%d", n/250, n%250+1)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprintf("p%04d", n),
		UID: types.UID(fmt.Sprint(n))},
		Spec: corev1.PodSpec{NodeName: "w1",
			Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: port}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip}}
	if ready {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	}
	return p
}

func show(e *corev1.Endpoints) string {
	var out []string
	for _, s := range e.Subsets {
		line := ""
		for _, a := range s.Addresses {
			line += a.IP + " "
		}
		for _, a := range s.NotReadyAddresses {
			line += "(" + a.IP + ") "
		}
		for _, p := range s.Ports {
			line += fmt.Sprint(":", p.Port)
		}
		out = append(out, line)
	}
	return strings.Join(out, "; ")
}

// F116
func TestDesired(t *testing.T) {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web",
		Labels: map[string]string{"team": "a"}},
		Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1",
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromString("web"),
				Protocol: corev1.ProtocolTCP}}}}
	published := svc.DeepCopy()
	published.Spec.PublishNotReadyAddresses = true
	going := pod(2, true, 8080)
	going.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	ended := pod(3, true, 8080)
	ended.Status.Phase = corev1.PodSucceeded
	for _, c := range []struct {
		name string
		svc  *corev1.Service
		pods []*corev1.Pod
		want string
	}{
		{"nobody", svc, nil, ""},
		{"sorted, ready and not", svc, []*corev1.Pod{pod(1, true, 8080), pod(4, false, 8080), pod(0, true, 8080)},
			"10.244.0.1 10.244.0.2 (10.244.0.5) :8080"},
		{"another port is another subset", svc, []*corev1.Pod{pod(0, true, 8080), pod(1, true, 9090)},
			"10.244.0.1 :8080; 10.244.0.2 :9090"},
		{"going and ended are out", svc, []*corev1.Pod{going, ended}, ""},
		{"published whatever their state", published, []*corev1.Pod{pod(0, false, 8080), going},
			"10.244.0.1 10.244.0.3 :8080"},
	} {
		if got := show(Desired(c.svc, c.pods)); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	e := Desired(svc, nil)
	if e.Name != "web" || e.Labels["team"] != "a" || e.Labels[managedByLabel] != managedBy {
		t.Errorf("metadata %+v", e.ObjectMeta)
	}
	var many []*corev1.Pod
	for i := range 1200 {
		many = append(many, pod(i, i >= 300, 8080))
	}
	e = Desired(svc, many)
	if len(e.Subsets[0].Addresses) != 900 || len(e.Subsets[0].NotReadyAddresses) != 100 ||
		e.Annotations[overCapacity] != overCapacityReason {
		t.Errorf("of 1200 pods %d ready and %d others are kept, %v", len(e.Subsets[0].Addresses),
			len(e.Subsets[0].NotReadyAddresses), e.Annotations)
	}
}
