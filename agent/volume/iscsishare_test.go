package volume

import (
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// An inline volume does not use the session of a pod with other credentials, whichever LUN it
// names. A pod whose login failed blocks nobody. F110
func TestSessionsAreSharedByCredentials(t *testing.T) {
	volumes, cluster, _ := newVolumes(t)
	for name, password := range map[string]string{"good": "of-the-initiator-1", "same": "of-the-initiator-1",
		"bad": "of-somebody-else-1"} {
		cluster.Put(&v1.Secret{ObjectMeta: newObjectMeta(name, "s-"+name), Data: map[string][]byte{
			"node.session.auth.username": []byte("user"), "node.session.auth.password": []byte(password)}})
	}
	source := func(uid, secret string, lun int32) (iscsiSource, string, iscsiRecord) {
		t.Helper()
		spec := &v1.ISCSIVolumeSource{TargetPortal: firstPortal, IQN: targetName, Lun: lun}
		if secret != "" {
			spec.SessionCHAPAuth, spec.SecretRef = true, &v1.LocalObjectReference{Name: secret}
		}
		p := newPod(uid, v1.Volume{Name: "disk"})
		s, err := inlineISCSI(p, "disk", spec)
		requireNoError(t, err)
		return s, filepath.Join(volumes.podDir(types.UID(uid)), "iscsi", "disk.json"),
			iscsiRecord{Version: 1, Target: s.disk.Target, Interface: s.disk.Interface, LUN: s.disk.LUN}
	}
	joins := func(uid, secret string, lun int32) error {
		t.Helper()
		s, file, r := source(uid, secret, lun)
		err := volumes.iscsi.checkISCSICredentials(s, file, &r)
		if strings.Contains(r.Secret, "of-") || err == nil && r.Secret == "" {
			t.Errorf("pod %s: the record holds %q", uid, r.Secret)
		}
		return err
	}
	record := func(uid, secret string, loggedIn bool) {
		t.Helper()
		s, file, r := source(uid, secret, 0)
		requireNoError(t, volumes.iscsi.checkISCSICredentials(s, file, &r))
		r.LoggedIn = loggedIn
		requireNoError(t, writeRecord(file, r))
	}
	record("failed", "bad", false)
	requireNoError(t, joins("first", "good", 0))
	record("first", "good", true)
	requireNoError(t, joins("second", "same", 1))
	for _, secret := range []string{"bad", ""} {
		for _, lun := range []int32{0, 1} {
			err := joins("thief", secret, lun)
			if err == nil || !strings.Contains(err.Error(), "in use on this node by pod first with other credentials") {
				t.Errorf("secret %q, LUN %d: %v", secret, lun, err)
			}
		}
	}
	s, file, r := source("claimed", "bad", 0)
	s.pvName = "pv1"
	requireNoError(t, volumes.iscsi.checkISCSICredentials(s, file, &r))
	if err := joins("unknown", "absent", 0); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("without its secret: %v", err)
	}
}
