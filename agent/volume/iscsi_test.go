package volume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/volume/iscsi/iscsitest"
)

const (
	targetName  = "iqn.2026-01.example:disks"
	firstPortal = "127.0.0.2:3260"
	otherPortal = "127.0.0.3:3260"
)

// initiator is a node, and a target of the same kernel.
type initiator struct {
	serverClient
	target *iscsitest.Target
	files  map[int]string // of the target's disks
}

func serveDisks(t *testing.T, luns ...int) *initiator {
	iscsitest.Need(t)
	n := &initiator{serverClient: serverClient{T: t}, target: iscsitest.Serve(t, targetName, firstPortal, otherPortal),
		files: map[int]string{}}
	for _, lun := range luns {
		n.files[lun] = n.target.Disk(lun, 16<<20)
	}
	n.volumes, n.cluster, _ = newVolumes(t)
	n.volumes.cfg.ISCSI.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	n.volumes.cfg.ISCSI.Patience = time.Minute // the clock of a slow virtual machine may run ahead
	t.Cleanup(func() {
		pods, err := n.volumes.Pods()
		for _, p := range pods {
			// so that a failing test does not affect others
			err = errors.Join(err, n.volumes.UnmountAll(context.Background(), p))
		}
		if err != nil {
			t.Error(err)
		}
		if left := iscsitest.Sessions(t); len(left) > 0 {
			t.Errorf("sessions that are left: %q", left)
		}
		if left := iscsitest.Records(t); len(left) > 0 {
			t.Errorf("records of iscsiadm that are left: %q", left)
		}
	})
	return n
}

// newISCSIVolume returns an inline volume with a disk of the target.
func newISCSIVolume(n int32, change ...func(*v1.ISCSIVolumeSource)) v1.Volume {
	s := &v1.ISCSIVolumeSource{TargetPortal: firstPortal, IQN: targetName, Lun: n}
	for _, f := range change {
		f(s)
	}
	return newVolume("data", v1.VolumeSource{ISCSI: s})
}

func setReadOnly(s *v1.ISCSIVolumeSource) { s.ReadOnly = true }

// newClaim stores a PersistentVolume with a disk, and a bound claim with the same name.
func (n *initiator) newClaim(name string, pv v1.PersistentVolumeSpec) v1.Volume {
	uid := types.UID(name)
	pv.ClaimRef = &v1.ObjectReference{Namespace: "default", Name: name, UID: uid}
	n.cluster.Put(
		&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uid},
			Spec:   v1.PersistentVolumeClaimSpec{VolumeName: name},
			Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: pv})
	n.setAttached(name, pv.ISCSI)
	return newVolume("data",
		v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}})
}

// setAttached stores the objects for a volume that is attached to the node and reported as in use.
func (n *initiator) setAttached(pv string, d *v1.ISCSIPersistentVolumeSource) {
	handle := fmt.Sprintf("%s:%d", d.IQN, d.Lun)
	name := v1.UniqueVolumeName("kubernetes.io/iscsi/" + handle)
	node, ok := n.cluster.Node()
	if !ok {
		node = &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}}
	}
	node = node.DeepCopy()
	node.Status.VolumesInUse = append(node.Status.VolumesInUse, name)
	node.Status.VolumesAttached = append(node.Status.VolumesAttached, v1.AttachedVolume{Name: name})
	n.cluster.Put(node,
		&storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: agent.AttachmentName(handle,
			"iscsi.keelson.dev", "here")}, Status: storagev1.VolumeAttachmentStatus{Attached: true},
			Spec: storagev1.VolumeAttachmentSpec{Attacher: "iscsi.keelson.dev", NodeName: "here",
				Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &pv}}})
}

func newISCSISource(lun int32) v1.PersistentVolumeSource {
	return v1.PersistentVolumeSource{ISCSI: &v1.ISCSIPersistentVolumeSource{TargetPortal: firstPortal,
		IQN: targetName, Lun: lun}}
}

func (n *initiator) mustMount(p *v1.Pod) agent.Mount {
	n.Helper()
	start := time.Now()
	m, err := n.volumes.MountAll(n.Context(), p)
	requireNoError(n.T, err)
	n.Logf("mounted for %s after %s", p.UID, time.Since(start).Round(time.Millisecond))
	return m["data"]
}

// awaitSessions waits for a number of sessions of the node.
func (n *initiator) awaitSessions(want int) {
	n.Helper()
	if have := iscsitest.Sessions(n.T); len(have) != want {
		n.Errorf("the node has the sessions %q, want %d", have, want)
	}
}

// awaitIdle waits until the node has nothing of any target.
func (n *initiator) awaitIdle() {
	n.Helper()
	n.awaitSessions(0)
	if _, err := os.Stat(filepath.Join(n.volumes.kubeletDir(), "plugins/kubernetes.io/iscsi",
		"default")); !errors.Is(err, os.ErrNotExist) {
		n.Errorf("the folder of targets: %v", err)
	}
}

// F110: pods use disks of a target as file systems, inline and through claims. A blank disk is
// formatted, never one with content. It is mounted once for all pods of the node, and kept across
// restarts of pods and agent. The node logs in once per target, and logs out after the last disk.
func TestDisksOfATarget(t *testing.T) {
	n := serveDisks(t, 0, 1)
	group := int64(4711)
	one := newPod("u1", newISCSIVolume(0))
	one.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &group}
	at := n.mustMount(one).HostPath
	requireNoError(t, os.WriteFile(filepath.Join(at, "file"), []byte("kept"), 0o600))
	if st, err := os.Stat(at); err != nil || fileGroup(st) != group {
		t.Errorf("%s: %v, %v", at, st, err)
	}
	n.awaitSessions(1)
	// A restarted agent uses existing mounts without contacting the target.
	n.volumes = New(*n.volumes.cfg)
	if again := n.mustMount(one).HostPath; again != at {
		t.Errorf("%s, and then %s", at, again)
	}
	if got := mustRead(t, filepath.Join(n.mustMount(newPod("u2", newISCSIVolume(0))).HostPath, "file")); got != "kept" {
		t.Errorf("a second pod reads %q", got)
	}
	claim := n.newClaim("other", v1.PersistentVolumeSpec{PersistentVolumeSource: newISCSISource(1),
		MountOptions: []string{"noatime"}})
	three := n.mustMount(newPod("u3", claim)).HostPath
	n.awaitSessions(1)
	var fs unix.Statfs_t
	if requireNoError(t, unix.Statfs(three, &fs)); fs.Flags&unix.ST_NOATIME == 0 || fs.Type != unix.EXT4_SUPER_MAGIC {
		t.Errorf("LUN 1 has %#x, with flags %#x", fs.Type, fs.Flags)
	}
	if _, err := os.Stat(filepath.Join(three, "file")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("LUN 1 has what LUN 0 has: %v", err)
	}
	n.unmountPod("u1")
	if got := mustRead(t, filepath.Join(n.mustMount(newPod("u2", newISCSIVolume(0))).HostPath, "file")); got != "kept" {
		t.Errorf("when the first is gone, the second pod reads %q", got)
	}
	n.unmountPod("u2")
	n.awaitSessions(1) // for LUN 1
	requireNoError(t, os.WriteFile(filepath.Join(three, "more"), nil, 0o600))
	n.unmountPod("u3")
	n.awaitIdle()
	if got := mustRead(t, filepath.Join(n.mustMount(newPod("u4", newISCSIVolume(0))).HostPath, "file")); got != "kept" {
		t.Errorf("the next pod reads %q", got)
	}
	n.unmountPod("u4")
	n.awaitIdle()
}

// A disk is attached read-only if the volume requests it, for all pods on the node. A blank disk is
// not formatted then. F110
func TestDisksThatAreRead(t *testing.T) {
	n := serveDisks(t, 0)
	before := mustRead(t, n.files[0])
	n.expectMountError(newPod("u1", newISCSIVolume(0, setReadOnly)), "is blank and cannot be mounted read-only")
	if mustRead(t, n.files[0]) != before {
		t.Error("a blank disk was written to")
	}
	requireNoError(t, os.WriteFile(filepath.Join(n.mustMount(newPod("u2", newISCSIVolume(0))).HostPath, "file"),
		[]byte("kept"), 0o600))
	_, err := n.volumes.MountAll(t.Context(), newPod("u3", newISCSIVolume(0, setReadOnly)))
	if want := "is in use on this node by pod u2, with readOnly: false: all its volumes must have the same " +
		"readOnly"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.unmountPod("u3")
	n.unmountPod("u2")
	for _, uid := range []string{"u4", "u5"} {
		m := n.mustMount(newPod(uid, newISCSIVolume(0, setReadOnly)))
		if got := mustRead(t, filepath.Join(m.HostPath, "file")); got != "kept" || !m.ReadOnly {
			t.Errorf("%s reads %q, %+v", uid, got, m)
		}
		if err := os.WriteFile(filepath.Join(m.HostPath, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("%s writes: %v", uid, err)
		}
	}
	n.unmountPod("u4")
	n.unmountPod("u5")
	n.awaitIdle()
}

// With volumeMode Block the pod gets the device, which is not formatted. F110
func TestDisksAsBlockDevices(t *testing.T) {
	n := serveDisks(t, 0, 3)
	block := v1.PersistentVolumeBlock
	claim := n.newClaim("raw", v1.PersistentVolumeSpec{PersistentVolumeSource: newISCSISource(3), VolumeMode: &block})
	one := withDevices(newPod("u1", claim), "data")
	m := n.mustMount(one)
	if !m.Block || !isBlockDevice(m.HostPath) {
		t.Fatalf("%+v", m)
	}
	f, err := os.OpenFile(m.HostPath, os.O_RDWR|unix.O_SYNC, 0)
	requireNoError(t, err)
	_, err = f.WriteAt([]byte("of one"), 4096)
	requireNoError(t, errors.Join(err, f.Close()))
	if got := mustRead(t, n.files[3])[4096:4102]; got != "of one" {
		t.Errorf("the target has %q", got)
	}
	n.volumes = New(*n.volumes.cfg)
	if again := n.mustMount(one); again != m {
		t.Errorf("%+v, and then %+v", m, again)
	}
	n.mustMount(newPod("u2", newISCSIVolume(0)))
	n.unmountPod("u1")
	n.awaitSessions(1)
	if isBlockDevice(m.HostPath) {
		t.Error("the device of a disk that nobody uses is there still")
	}
	_, err = n.volumes.MountAll(t.Context(), newPod("u3",
		n.newClaim("same", v1.PersistentVolumeSpec{PersistentVolumeSource: newISCSISource(0), VolumeMode: &block})))
	if want := `persistentvolume "same": iSCSI target iqn.2026-01.example:disks, LUN 0 is in use on this node in ` +
		`another volumeMode, by pod u2`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.unmountPod("u3")
	n.unmountPod("u2")
	n.awaitIdle()
}

// A node authenticates to a target with the volume's secret, which appears in no process arguments.
// A wrong secret is reported. F110
func TestTargetsThatAuthenticate(t *testing.T) {
	n := serveDisks(t, 0)
	const password, back = "of-the-initiator-1", "of-the-target-0001"
	n.target.Authenticate("user", password, "target", back)
	n.target.AuthenticateDiscovery("asker", password+"d")
	chap := func(s *v1.ISCSIVolumeSource) {
		s.DiscoveryCHAPAuth, s.SessionCHAPAuth, s.SecretRef = true, true, &v1.LocalObjectReference{Name: "chap"}
	}
	with := func(session, in, discovery string) {
		n.cluster.Put(&v1.Secret{ObjectMeta: newObjectMeta("chap", "s1"), Type: "kubernetes.io/iscsi-chap",
			Data: map[string][]byte{
				"node.session.auth.username": []byte("user"), "node.session.auth.password": []byte(session),
				"node.session.auth.username_in": []byte("target"), "node.session.auth.password_in": []byte(in),
				"discovery.sendtargets.auth.username": []byte("asker"),
				"discovery.sendtargets.auth.password": []byte(discovery)}})
	}
	n.expectMountError(newPod("u0", newISCSIVolume(0, chap)), `secret "default/chap" not found`)
	n.expectMountError(newPod("u1", newISCSIVolume(0)),
		"discovering targets of portal 127.0.0.2:3260: authentication failed")
	with("wrong-wrong-wrong", back, password+"d")
	n.expectMountError(newPod("u2", newISCSIVolume(0, chap)),
		"logging in at portal 127.0.0.2:3260: authentication failed: check the user names and passwords (CHAP) in "+
			"the volume's secret")
	with(password, "wrong-wrong-wrong", password+"d")
	n.expectMountError(newPod("u3", newISCSIVolume(0, chap)), "authentication failed")
	with(password, back, "wrong-wrong-wrong")
	n.expectMountError(newPod("u4", newISCSIVolume(0, chap)),
		"discovering targets of portal 127.0.0.2:3260: authentication failed")
	n.awaitIdle()

	with(password, back, password+"d")
	arguments := iscsitest.Arguments(t)
	var log bytes.Buffer
	n.volumes.cfg.ISCSI.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	requireNoError(t, os.WriteFile(filepath.Join(n.mustMount(newPod("u5", newISCSIVolume(0, chap))).HostPath, "file"),
		[]byte("kept"), 0o600))
	if given := arguments(); strings.Contains(given+log.String(), password) || !strings.Contains(given, "--login") {
		t.Errorf("iscsiadm was given %s; the log has %s", given, &log)
	}
	for _, file := range iscsitest.Records(t) {
		if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("record %s: %v, %v", file, st.Mode(), err)
		}
	}
	n.unmountPod("u5")
	n.awaitIdle()
}

// A missing disk or target is reported by name, and found once it exists. F110
func TestDisksThatAreNotThere(t *testing.T) {
	n := serveDisks(t, 0)
	n.expectMountError(newPod("u1", newISCSIVolume(7)),
		"iSCSI target iqn.2026-01.example:disks at 127.0.0.2:3260, LUN 7: the target offers no LUN 7 to this "+
			"node's initiator")
	n.mustMount(newPod("u2", newISCSIVolume(0)))
	n.expectMountError(newPod("u3", newISCSIVolume(7)), "the target offers no LUN 7")
	n.target.Disk(7, 16<<20)
	n.mustMount(newPod("u3", newISCSIVolume(7)))
	n.unmountPod("u2")
	n.unmountPod("u3")
	n.awaitIdle()
	n.expectMountError(newPod("u4", newISCSIVolume(0, func(s *v1.ISCSIVolumeSource) {
		s.IQN = "iqn.2026-01.example:none"
	})),
		"portal 127.0.0.2:3260 does not offer this target to this node's initiator: it offers "+
			"iqn.2026-01.example:disks")
	n.expectMountError(newPod("u5", newISCSIVolume(0, func(s *v1.ISCSIVolumeSource) {
		s.TargetPortal = "127.0.0.2:3999"
	})), "this node does not reach portal 127.0.0.2:3999, or nothing listens there")
	n.expectMountError(newPod("u6", newISCSIVolume(0, func(s *v1.ISCSIVolumeSource) {
		s.ISCSIInterface = "none"
	})), "reading iSCSI interface none of this node: iscsiadm: ")
	t.Setenv("PATH", t.TempDir())
	n.expectMountError(newPod("u7", newISCSIVolume(0)),
		"iscsiadm is not on this node: install open-iscsi (iscsi-initiator-utils), and have iscsid run")
}

// A node uses the initiator name of a volume, through an interface of that volume. It logs in at
// all portals, of which one is sufficient. F110
func TestInitiatorsAndPortals(t *testing.T) {
	n := serveDisks(t, 0)
	named := func(s *v1.ISCSIVolumeSource) {
		name := "iqn.2026-01.example:another"
		s.InitiatorName, s.Portals = &name, []string{otherPortal, "127.0.0.2"}
	}
	at := n.mustMount(newPod("u1", newISCSIVolume(0, named))).HostPath
	n.awaitSessions(2)
	for _, s := range iscsitest.Sessions(t) {
		dir := filepath.Join("/sys/class/iscsi_session", s)
		if got := mustRead(t, filepath.Join(dir, "initiatorname")) +
			mustRead(t, filepath.Join(dir, "ifacename")); got != "iqn.2026-01.example:another\n127.0.0.2:3260:data\n" {
			t.Errorf("%s goes by %q", s, got)
		}
	}
	requireNoError(t, os.WriteFile(filepath.Join(at, "file"), []byte("kept"), 0o600))
	n.unmountPod("u1")
	n.awaitSessions(0)
	absent := func(s *v1.ISCSIVolumeSource) { s.TargetPortal, s.Portals = "127.0.0.2:3999", []string{otherPortal} }
	if got := mustRead(t, filepath.Join(n.mustMount(newPod("u2", newISCSIVolume(0, absent))).HostPath, "file")); got !=
		"kept" {
		t.Errorf("by the other portal a pod reads %q", got)
	}
	n.awaitSessions(1)
	n.unmountPod("u2")
	n.awaitSessions(0)
}

// An existing session of other users is used and left in place. Nothing that is mounted loses its
// disk. F110
func TestSessionsOfOthers(t *testing.T) {
	n := serveDisks(t, 0, 1)
	iscsitest.Admin(t, "-m", "discovery", "-t", "sendtargets", "-p", firstPortal)
	iscsitest.Admin(t, "-m", "node", "-T", targetName, "-p", firstPortal, "--login")
	logout := func() {
		iscsitest.Admin(t, "-m", "node", "-T", targetName, "-p", firstPortal, "--logout")
		iscsitest.Admin(t, "-m", "node", "-T", targetName, "-o", "delete")
		iscsitest.Admin(t, "-m", "discoverydb", "-t", "sendtargets", "-p", firstPortal, "-o", "delete")
	}
	n.mustMount(newPod("u1", newISCSIVolume(0)))
	n.unmountPod("u1")
	n.awaitSessions(1)
	logout()

	n.mustMount(newPod("u2", newISCSIVolume(0)))
	global := filepath.Join(n.volumes.kubeletDir(), "plugins/kubernetes.io/iscsi/default", targetName, "lun-0")
	elsewhere := t.TempDir()
	requireNoError(t, unix.Mount(global, elsewhere, "", unix.MS_BIND, ""))
	err := n.volumes.UnmountAll(t.Context(), "u2")
	if want := "it is still mounted on this node, at " + elsewhere; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.awaitSessions(1)
	requireNoError(t, os.WriteFile(filepath.Join(elsewhere, "file"), nil, 0o600))
	requireNoError(t, unix.Unmount(elsewhere, 0))
	n.unmountPod("u2")
	n.awaitIdle()
}

// logsIn is the environment variable of a process that mounts a disk for a pod, and is killed like
// an agent.
const logsIn = "KEELSON_TEST_LOGS_IN"

func agentKilled() bool {
	dir := os.Getenv(logsIn)
	if dir == "" {
		return false
	}
	v := New(Config{Paths: agent.Paths{State: filepath.Join(dir, "state"), Run: filepath.Join(dir, "run")},
		Objects: fake.NewCluster()})
	_, err := v.MountAll(context.Background(), newPod("u1", newISCSIVolume(0)))
	fmt.Println(err)
	return true
}

// Everything that a killed agent leaves is removed by the next one. F110
func TestAgentsThatAreKilled(t *testing.T) {
	n := serveDisks(t, 0)
	iscsitest.Arguments(t)
	for about, moment := range map[string]struct {
		kills    string      // kill after iscsiadm was called with these arguments
		cond     func() bool // or when this returns true
		sessions int         // number of sessions at that time
	}{
		"the pod has a record": {cond: func() bool {
			return fileExists(filepath.Join(n.volumes.podDir("u1"), "iscsi", "data.json"))
		}},
		"the target was found":  {kills: "nonpersistent"},
		"iscsiadm has a record": {kills: "-o new"},
		"there is a session":    {kills: "--login", sessions: 1},
		"there is a place to mount at": {sessions: 1, cond: func() bool {
			return fileExists(filepath.Join(n.volumes.kubeletDir(), "plugins/kubernetes.io/iscsi/default",
				targetName, "lun-0"))
		}},
	} {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), logsIn+"="+filepath.Dir(n.volumes.cfg.Paths.State))
		if moment.kills != "" {
			cmd.Env = append(cmd.Env, iscsitest.Kills+"="+moment.kills)
		}
		requireNoError(t, cmd.Start())
		if moment.cond != nil {
			iscsitest.Until(t, func() error {
				if moment.cond() {
					return nil
				}
				return errors.New("waiting until " + about)
			})
			requireNoError(t, cmd.Process.Kill())
		}
		if err := cmd.Wait(); err == nil {
			t.Errorf("the agent was not killed when %s", about)
		}
		if have := len(iscsitest.Sessions(t)); have < moment.sessions {
			t.Errorf("when %s there are %d sessions", about, have)
		}
		n.volumes = New(*n.volumes.cfg)
		// a pending login ends first
		iscsitest.Until(t, func() error { return n.volumes.UnmountAll(t.Context(), "u1") })
		n.unmountPod("u1")
		n.awaitIdle()
		if left := iscsitest.Records(t); len(left) > 0 {
			t.Errorf("killed when %s, it left %q", about, left)
		}
	}
}

func fileExists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// A node that leaves its cluster while pods use disks keeps only what others created: no session,
// record, interface or password remains. A mounted disk stays until it is unmounted. F110
func TestTargetsThatANodeLeaves(t *testing.T) {
	n := serveDisks(t, 0, 1)
	const password, back = "of-the-initiator-1", "of-the-target-0001"
	n.target.Authenticate("user", password, "target", back)
	n.cluster.Put(&v1.Secret{ObjectMeta: newObjectMeta("chap", "s1"), Type: "kubernetes.io/iscsi-chap",
		Data: map[string][]byte{
			"node.session.auth.username": []byte("user"), "node.session.auth.password": []byte(password),
			"node.session.auth.username_in": []byte("target"), "node.session.auth.password_in": []byte(back)}})
	foreign := iscsitest.Serve(t, "iqn.2026-01.example:foreign", "127.0.0.4:3260")
	foreign.Disk(0, 16<<20)
	admin := func(args ...string) {
		t.Helper()
		iscsitest.Admin(t, append([]string{"-m", "node", "-T", foreign.Name, "-p", "127.0.0.4:3260,1", "-I", "default"},
			args...)...)
	}
	admin("-o", "new")
	admin("--login")
	defer admin("-o", "delete")
	defer admin("--logout")
	others := iscsitest.Records(t)
	chap := func(s *v1.ISCSIVolumeSource) {
		s.SessionCHAPAuth, s.SecretRef = true, &v1.LocalObjectReference{Name: "chap"}
	}
	another := func(s *v1.ISCSIVolumeSource) {
		name := "iqn.2026-01.example:another"
		s.InitiatorName, s.Portals = &name, []string{otherPortal}
	}
	n.mustMount(newPod("u1", newISCSIVolume(0, chap)))
	n.mustMount(newPod("u2", newISCSIVolume(1, chap, another)))
	n.awaitSessions(4)

	elsewhere := t.TempDir()
	requireNoError(t, unix.Mount(filepath.Join(n.volumes.kubeletDir(), "plugins/kubernetes.io/iscsi/default",
		targetName, "lun-0"), elsewhere, "", unix.MS_BIND, ""))
	for _, dir := range []string{n.volumes.kubeletDir(), n.volumes.cfg.Paths.State} {
		requireNoError(t, unmountBelow(t.Context(), dir))
	}
	remove := func() error { return RemoveISCSI(t.Context(), n.volumes.kubeletDir(), n.volumes.cfg.ISCSI) }
	err := remove()
	if want := "it is still mounted on this node, at " + elsewhere; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.awaitSessions(2)
	requireNoError(t, unix.Unmount(elsewhere, 0))
	requireNoError(t, errors.Join(remove(), remove()))
	n.awaitSessions(1)
	if left := iscsitest.Records(t); !slices.Equal(left, others) {
		t.Errorf("records of iscsiadm: %q, want those of others, %q", left, others)
	}
}

// An unreachable portal blocks nobody longer than a timeout, neither a mount nor an unmount with
// unwritten data. The unmount completes when the kernel has given up. F110
func TestPortalsThatHang(t *testing.T) {
	n := serveDisks(t, 0)
	at := n.mustMount(newPod("u1", newISCSIVolume(0))).HostPath
	f, err := os.Create(filepath.Join(at, "new"))
	requireNoError(t, err)
	mend := iscsitest.Cut(t, "127.0.0.2")
	_, err = f.Write(make([]byte, 1<<20)) // into the page cache
	requireNoError(t, errors.Join(err, f.Close()))

	n.volumes.cfg.ISCSI.Patience = 4 * time.Second
	n.volumes = New(*n.volumes.cfg)
	start := time.Now()
	_, err = n.volumes.MountAll(t.Context(), newPod("u2",
		newVolume("data",
			v1.VolumeSource{ISCSI: &v1.ISCSIVolumeSource{TargetPortal: "127.0.0.2", IQN: "iqn.2026-01.example:more"}})))
	if want := "discovering targets of portal 127.0.0.2:3260: portal 127.0.0.2:3260 did not answer within 4s"; err ==
		nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.unmountPod("u2")
	t.Logf("another pod was refused after %s", time.Since(start).Round(time.Millisecond))
	start = time.Now()
	err = n.volumes.UnmountAll(t.Context(), "u1")
	t.Logf("unmounting, after %s: %v", time.Since(start).Round(time.Millisecond), err)
	n.volumes.cfg.ISCSI.Patience = time.Minute
	n.volumes = New(*n.volumes.cfg)
	iscsitest.Until(t, func() error { return n.volumes.UnmountAll(t.Context(), "u1") })
	t.Logf("unmounted after %s", time.Since(start).Round(time.Second))
	n.unmountPod("u1")
	n.awaitIdle()
	mend()
}
