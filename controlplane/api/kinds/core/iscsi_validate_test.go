package core_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// What no node could log in to is refused with the field, in pods and in PersistentVolumes; what is left out has its default. F110
func TestISCSI(t *testing.T) {
	pod := func(disk string) field.ErrorList {
		return kindstest.ValidationErrors[*corev1.Pod](t,
			"{metadata: {name: a, namespace: n}, spec: {containers: [{name: c, image: i}], volumes: [{name: disk, "+
				"iscsi: {"+disk+"}}]}}")
	}
	volume := func(disk string) field.ErrorList {
		return kindstest.ValidationErrors[*corev1.PersistentVolume](t,
			"{metadata: {name: a}, spec: {accessModes: [ReadWriteOnce], capacity: {storage: 1Gi}, mountOptions: "+
				"[noatime], iscsi: {"+disk+"}}}")
	}
	const iqn = "iqn: 'iqn.2026-01.example:disks', "
	for about, c := range map[string]struct{ disk, want string }{
		"whole": {iqn + "targetPortal: 192.0.2.1, lun: 255, portals: ['192.0.2.2:3261', '[2001:db8::1]:3260', " +
			"'2001:db8::1'], iscsiInterface: eth1, fsType: xfs, " +
			"chapAuthSession: true, secretRef: {name: chap}, initiatorName: 'naa.0123456789abcdef'", ""},
		"no target": {"targetPortal: 192.0.2.1, lun: 0", "iscsi.iqn: Required value]"},
		"no name": {"iqn: disks, targetPortal: 192.0.2.1, lun: 0",
			`iscsi.iqn: Invalid value: "disks": must be valid format`},
		"a path": {"iqn: 'iqn.2026-01.example:../x', targetPortal: 192.0.2.1, lun: 0",
			"iscsi.iqn: Invalid value"},
		"a long name": {"iqn: 'iqn.2026-01.example:" + strings.Repeat("x", 223) +
			"', targetPortal: 192.0.2.1, lun: 0", "iscsi.iqn: Too long: may not be more than 223 bytes"},
		"no portal": {iqn + "lun: 0", "iscsi.targetPortal: Required value]"},
		"a portal's name": {iqn + "lun: 0, targetPortal: disks.example.com",
			`iscsi.targetPortal: Invalid value: "disks.example.com": must be an IP address, with a port where ` +
				`that is not 3260`},
		"other portals": {iqn + "lun: 0, targetPortal: 192.0.2.1, portals: ['192.0.2.2:0']",
			"iscsi.portals[0]: Invalid value"},
		"many portals": {iqn + "lun: 0, targetPortal: 192.0.2.1, portals: [" + strings.Repeat("192.0.2.2, ", 33) +
			"]", "iscsi.portals: Too many: 33: must have at most 32 items"},
		"a large LUN": {iqn + "lun: 256, targetPortal: 192.0.2.1",
			"iscsi.lun: Invalid value: 256: must be between 0 and 255, inclusive"},
		"a negative LUN": {iqn + "lun: -1, targetPortal: 192.0.2.1", "iscsi.lun: Invalid value: -1"},
		"an option": {iqn + "lun: 0, targetPortal: 192.0.2.1, iscsiInterface: '-x'",
			`iscsi.iscsiInterface: Invalid value: "-x": must be the name of an interface`},
		"no secret": {iqn + "lun: 0, targetPortal: 192.0.2.1, chapAuthDiscovery: true",
			"iscsi.secretRef: Required value]"},
		"an initiator": {iqn + "lun: 0, targetPortal: 192.0.2.1, initiatorName: me",
			`iscsi.initiatorname: Invalid value: "me": must be valid format`},
		"a long interface": {iqn + "lun: 0, targetPortal: '[2001:0db8:0000:0000:0000:0000:0000:0000:0001]:3260" +
			strings.Repeat("0", 30) + "', initiatorName: 'iqn.2026-01.example:me'",
			"iscsi.targetPortal: Invalid value"},
	} {
		for kind, got := range map[string]field.ErrorList{"pod": pod(c.disk), "volume": volume(c.disk)} {
			if all := fmt.Sprint(got); c.want == "" && len(got) > 0 || !strings.Contains(all, c.want) {
				t.Errorf("%s of a %s: %s, want %s", about, kind, all, c.want)
			}
		}
	}
	p,
		v :=
		&corev1.Pod{Spec: corev1.PodSpec{Volumes: []corev1.Volume{
			{VolumeSource: corev1.VolumeSource{ISCSI: &corev1.ISCSIVolumeSource{}}}}}},
		&corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{ISCSI: &corev1.ISCSIPersistentVolumeSource{}}}}
	podspec.DefaultVolume(&p.Spec.Volumes[0].VolumeSource)
	core.PersistentVolumeKind().Writes.Default(v)
	if p.Spec.Volumes[0].ISCSI.ISCSIInterface != "default" || v.Spec.ISCSI.ISCSIInterface != "default" {
		t.Errorf("interfaces are %q and %q", p.Spec.Volumes[0].ISCSI.ISCSIInterface, v.Spec.ISCSI.ISCSIInterface)
	}
}
