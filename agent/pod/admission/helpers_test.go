package admission

import (
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// simplePod returns a pod with the containers, or with one container "app".
func simplePod(uid string, containers ...v1.Container) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web-" + uid, Namespace: "default", UID: types.UID(uid),
		CreationTimestamp: metav1.Now()},
		Spec:   v1.PodSpec{RestartPolicy: v1.RestartPolicyAlways, NodeName: "w1", DNSPolicy: v1.DNSClusterFirst},
		Status: v1.PodStatus{Phase: v1.PodPending}}
	if len(containers) == 0 {
		containers = []v1.Container{{Name: "app", Image: "hello:1"}}
	}
	p.Spec.Containers = containers
	return p
}

// amounts parses resources such as "cpu=1 memory=1Gi".
func amounts(text string) v1.ResourceList {
	l := v1.ResourceList{}
	for _, f := range strings.Fields(text) {
		name, q, _ := strings.Cut(f, "=")
		l[v1.ResourceName(name)] = resource.MustParse(q)
	}
	return l
}

// sized returns a pod with one container and the given requests and limits.
func sized(uid string, requests, limits string) *v1.Pod {
	p := simplePod(uid)
	p.Generation = 1
	p.Spec.Containers[0].Resources = v1.ResourceRequirements{Requests: amounts(requests), Limits: amounts(limits)}
	return p
}
