package attack

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// probeConfigMap returns an object that the tests create to show that writes succeed.
func probeConfigMap() *v1.ConfigMap {
	return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "proof-"}}
}

// The harness must see the cluster: daemons, their memory, and every replica's writes.
func TestHarness(t *testing.T) {
	guardCluster(t)
	for name, pid := range daemonPIDs(t) {
		if pid == 0 {
			t.Errorf("the daemon of %s does not run", name)
		}
	}
	clearPeak(t, "cp1")
	if now, top := residentMemory(t, "cp1"), peakMemory(t, "cp1"); now < megabyte || top < now/2 {
		t.Errorf("cp1 has %d bytes resident and a peak of %d", now, top)
	}
}
