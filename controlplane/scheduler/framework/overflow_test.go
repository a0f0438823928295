package framework

import (
	"math"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// F95: amounts that do not fit an int64 are the largest, also when they are added, and leave nothing behind when their
// pods go.
func TestAmountsDoNotOverflow(t *testing.T) {
	asks := func(uid, cpu, memory string) *PodInfo {
		pod := &PodInfo{Pod: &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)},
			Spec: v1.PodSpec{Containers: []v1.Container{{
				Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
					v1.ResourceCPU: resource.MustParse(cpu), v1.ResourceMemory: resource.MustParse(memory)}}}}}}}
		pod.setRequests()
		return pod
	}
	huge := asks("a", "10E", "8E")
	if huge.Requests.MilliCPU != math.MaxInt64 {
		t.Errorf("10E cores are %d thousandths", huge.Requests.MilliCPU)
	}
	var n NodeInfo
	n.AddPod(huge)
	n.AddPod(asks("b", "9P", "8E"))
	n.AddPod(asks("c", "2", "1Gi"))
	if n.Requested.MilliCPU != math.MaxInt64 || n.Requested.Memory != math.MaxInt64 || n.CountedMem != math.MaxInt64 {
		t.Errorf("the sums are %+v and %d", n.Requested, n.CountedMem)
	}
	n.RemovePod("a")
	n.RemovePod("b")
	if n.Requested.MilliCPU != 2000 || n.Requested.Memory != 1<<30 || n.CountedCPU != 2000 {
		t.Errorf("afterwards the sums are %+v and %d", n.Requested, n.CountedCPU)
	}
}
