package criconfig

import (
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

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
