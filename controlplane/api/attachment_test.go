package api

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// What a Node's status names is read back.
func TestAttachedNames(t *testing.T) {
	for _, v := range [][2]string{{ISCSIAttacher, "192.0.2.1:3260/iqn.2026-01.example:a/0"}, {"disk.example", "a^b"},
		{"disk.example", "h"}} {
		if driver, handle, ok := ParseAttachedVolumeName(AttachedVolumeName(v[0], v[1])); !ok || driver != v[0] ||
			handle != v[1] {
			t.Errorf("%v: %s, %s, %t", v, driver, handle, ok)
		}
	}
	for _, name := range []corev1.UniqueVolumeName{"", "kubernetes.io/csi/disk.example", "kubernetes.io/aws-ebs/v"} {
		if driver, handle, ok := ParseAttachedVolumeName(name); ok {
			t.Errorf("%q: %s, %s", name, driver, handle)
		}
	}
}
