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

// initiator is a node, and a target that the same kernel is.
type initiator struct {
	client
	target *iscsitest.Target
	files  map[int]string // of the target's disks
}

func serveDisks(t *testing.T, luns ...int) *initiator {
	iscsitest.Need(t)
	n := &initiator{client: client{T: t}, target: iscsitest.Serve(t, targetName, firstPortal, otherPortal), files: map[int]string{}}
	for _, lun := range luns {
		n.files[lun] = n.target.Disk(lun, 16<<20)
	}
	n.volumes, n.cluster, _ = newVolumes(t)
	n.volumes.cfg.ISCSI.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	n.volumes.cfg.ISCSI.Patience = time.Minute // the clock of a slow machine in software runs ahead of what it does
	t.Cleanup(func() {
		pods, err := n.volumes.Pods()
		for _, p := range pods {
			err = errors.Join(err, n.volumes.UnmountAll(context.Background(), p)) // so that one test that fails is one
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

// lun is a disk of the target, by itself.
func lun(n int32, change ...func(*v1.ISCSIVolumeSource)) v1.Volume {
	s := &v1.ISCSIVolumeSource{TargetPortal: firstPortal, IQN: targetName, Lun: n}
	for _, f := range change {
		f(s)
	}
	return volume("data", v1.VolumeSource{ISCSI: s})
}

func readOnly(s *v1.ISCSIVolumeSource) { s.ReadOnly = true }

// claim makes a PersistentVolume of a disk, and a claim of its name that is bound to it.
func (n *initiator) claim(name string, pv v1.PersistentVolumeSpec) v1.Volume {
	uid := types.UID(name)
	pv.ClaimRef = &v1.ObjectReference{Namespace: "default", Name: name, UID: uid}
	n.cluster.Put(
		&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uid},
			Spec: v1.PersistentVolumeClaimSpec{VolumeName: name}, Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: pv})
	n.attached(name, pv.ISCSI)
	return volume("data", v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}})
}

// attached says that a volume is attached to the node, and that the control plane knows that it is in use.
func (n *initiator) attached(pv string, d *v1.ISCSIPersistentVolumeSource) {
	handle := fmt.Sprintf("%s:%d", d.IQN, d.Lun)
	name := v1.UniqueVolumeName("kubernetes.io/iscsi/" + handle)
	node, ok := n.cluster.Node()
	if !ok {
		node = &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}}
	}
	node = node.DeepCopy()
	node.Status.VolumesInUse = append(node.Status.VolumesInUse, name)
	node.Status.VolumesAttached = append(node.Status.VolumesAttached, v1.AttachedVolume{Name: name})
	n.cluster.Put(node, &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: agent.AttachmentName(handle, "iscsi.keelson.dev", "here")}, Status: storagev1.VolumeAttachmentStatus{Attached: true},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: "iscsi.keelson.dev", NodeName: "here", Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &pv}}})
}

func ofTarget(lun int32) v1.PersistentVolumeSource {
	return v1.PersistentVolumeSource{ISCSI: &v1.ISCSIPersistentVolumeSource{TargetPortal: firstPortal, IQN: targetName, Lun: lun}}
}

func (n *initiator) mount(p *v1.Pod) agent.Mount {
	n.Helper()
	start := time.Now()
	m, err := n.volumes.MountAll(n.Context(), p)
	must(n.T, err)
	n.Logf("mounted for %s after %s", p.UID, time.Since(start).Round(time.Millisecond))
	return m["data"]
}

// sessions is how many the node has.
func (n *initiator) sessions(want int) {
	n.Helper()
	if have := iscsitest.Sessions(n.T); len(have) != want {
		n.Errorf("the node has the sessions %q, want %d", have, want)
	}
}

// idle says that nothing of any target is left on the node.
func (n *initiator) idle() {
	n.Helper()
	n.sessions(0)
	if _, err := os.Stat(filepath.Join(n.volumes.kubelet(), "plugins/kubernetes.io/iscsi", "default")); !errors.Is(err, os.ErrNotExist) {
		n.Errorf("the folder of targets: %v", err)
	}
}

// F110: disks of a target are file systems in pods, by themselves and by claims: made where a disk is blank and never over anything,
// mounted once for all pods of the node, kept when a pod or the agent starts anew. The node logs in once for a target and
// out when the last disk of it is gone.
func TestDisksOfATarget(t *testing.T) {
	n := serveDisks(t, 0, 1)
	group := int64(4711)
	one := pod("u1", lun(0))
	one.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &group}
	at := n.mount(one).HostPath
	must(t, os.WriteFile(filepath.Join(at, "file"), []byte("kept"), 0o600))
	if st, err := os.Stat(at); err != nil || groupOf(st) != group {
		t.Errorf("%s: %v, %v", at, st, err)
	}
	n.sessions(1)
	// An agent that starts anew keeps to what is there, and asks nobody.
	n.volumes = New(n.volumes.cfg)
	if again := n.mount(one).HostPath; again != at {
		t.Errorf("%s, and then %s", at, again)
	}
	if got := read(t, filepath.Join(n.mount(pod("u2", lun(0))).HostPath, "file")); got != "kept" {
		t.Errorf("a second pod reads %q", got)
	}
	claim := n.claim("other", v1.PersistentVolumeSpec{PersistentVolumeSource: ofTarget(1), MountOptions: []string{"noatime"}})
	three := n.mount(pod("u3", claim)).HostPath
	n.sessions(1)
	var fs unix.Statfs_t
	if must(t, unix.Statfs(three, &fs)); fs.Flags&unix.ST_NOATIME == 0 || fs.Type != unix.EXT4_SUPER_MAGIC {
		t.Errorf("LUN 1 has %#x, with flags %#x", fs.Type, fs.Flags)
	}
	if _, err := os.Stat(filepath.Join(three, "file")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("LUN 1 has what LUN 0 has: %v", err)
	}
	n.gone("u1")
	if got := read(t, filepath.Join(n.mount(pod("u2", lun(0))).HostPath, "file")); got != "kept" {
		t.Errorf("when the first is gone, the second pod reads %q", got)
	}
	n.gone("u2")
	n.sessions(1) // for LUN 1
	must(t, os.WriteFile(filepath.Join(three, "more"), nil, 0o600))
	n.gone("u3")
	n.idle()
	if got := read(t, filepath.Join(n.mount(pod("u4", lun(0))).HostPath, "file")); got != "kept" {
		t.Errorf("the next pod reads %q", got)
	}
	n.gone("u4")
	n.idle()
}

// A disk is read-only where the volume says so, for all that have it on the node; a blank one is not written to for that. F110
func TestDisksThatAreRead(t *testing.T) {
	n := serveDisks(t, 0)
	before := read(t, n.files[0])
	n.fails(pod("u1", lun(0, readOnly)), "is blank, and is to be mounted read-only")
	if read(t, n.files[0]) != before {
		t.Error("a blank disk was written to")
	}
	must(t, os.WriteFile(filepath.Join(n.mount(pod("u2", lun(0))).HostPath, "file"), []byte("kept"), 0o600))
	_, err := n.volumes.MountAll(t.Context(), pod("u3", lun(0, readOnly)))
	if want := "is in use on this node by pod u2, which has readOnly: false: all that have it say the same"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.gone("u3")
	n.gone("u2")
	for _, uid := range []string{"u4", "u5"} {
		m := n.mount(pod(uid, lun(0, readOnly)))
		if got := read(t, filepath.Join(m.HostPath, "file")); got != "kept" || !m.ReadOnly {
			t.Errorf("%s reads %q, %+v", uid, got, m)
		}
		if err := os.WriteFile(filepath.Join(m.HostPath, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("%s writes: %v", uid, err)
		}
	}
	n.gone("u4")
	n.gone("u5")
	n.idle()
}

// With volumeMode Block a pod has the device, of which nothing is made. F110
func TestDisksAsBlockDevices(t *testing.T) {
	n := serveDisks(t, 0, 3)
	block := v1.PersistentVolumeBlock
	claim := n.claim("raw", v1.PersistentVolumeSpec{PersistentVolumeSource: ofTarget(3), VolumeMode: &block})
	one := given(pod("u1", claim), "data")
	m := n.mount(one)
	if !m.Block || !isBlockDevice(m.HostPath) {
		t.Fatalf("%+v", m)
	}
	f, err := os.OpenFile(m.HostPath, os.O_RDWR|unix.O_SYNC, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("of one"), 4096)
	must(t, errors.Join(err, f.Close()))
	if got := read(t, n.files[3])[4096:4102]; got != "of one" {
		t.Errorf("the target has %q", got)
	}
	n.volumes = New(n.volumes.cfg)
	if again := n.mount(one); again != m {
		t.Errorf("%+v, and then %+v", m, again)
	}
	n.mount(pod("u2", lun(0)))
	n.gone("u1")
	n.sessions(1)
	if isBlockDevice(m.HostPath) {
		t.Error("the device of a disk that nobody uses is there still")
	}
	_, err = n.volumes.MountAll(t.Context(), pod("u3", n.claim("same", v1.PersistentVolumeSpec{PersistentVolumeSource: ofTarget(0), VolumeMode: &block})))
	if want := `persistentvolume "same": iSCSI target iqn.2026-01.example:disks, LUN 0 is in use on this node in another volumeMode, by pod u2`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.gone("u3")
	n.gone("u2")
	n.idle()
}

// A node proves itself to a target by what the volume's secret has, which no process has among its arguments; and says so where
// that is wrong. F110
func TestTargetsThatAuthenticate(t *testing.T) {
	n := serveDisks(t, 0)
	const password, back = "of-the-initiator-1", "of-the-target-0001"
	n.target.Authenticate("user", password, "target", back)
	n.target.AuthenticateDiscovery("asker", password+"d")
	chap := func(s *v1.ISCSIVolumeSource) {
		s.DiscoveryCHAPAuth, s.SessionCHAPAuth, s.SecretRef = true, true, &v1.LocalObjectReference{Name: "chap"}
	}
	with := func(session, in, discovery string) {
		n.cluster.Put(&v1.Secret{ObjectMeta: named("chap", "s1"), Type: "kubernetes.io/iscsi-chap", Data: map[string][]byte{
			"node.session.auth.username": []byte("user"), "node.session.auth.password": []byte(session),
			"node.session.auth.username_in": []byte("target"), "node.session.auth.password_in": []byte(in),
			"discovery.sendtargets.auth.username": []byte("asker"), "discovery.sendtargets.auth.password": []byte(discovery)}})
	}
	n.fails(pod("u0", lun(0, chap)), `secret "default/chap" not found`)
	n.fails(pod("u1", lun(0)), "asking portal 127.0.0.2:3260 for its targets: authentication failed")
	with("wrong-wrong-wrong", back, password+"d")
	n.fails(pod("u2", lun(0, chap)), "logging in at portal 127.0.0.2:3260: authentication failed: see the user names and passwords (CHAP) in the volume's secret")
	with(password, "wrong-wrong-wrong", password+"d")
	n.fails(pod("u3", lun(0, chap)), "authentication failed")
	with(password, back, "wrong-wrong-wrong")
	n.fails(pod("u4", lun(0, chap)), "asking portal 127.0.0.2:3260 for its targets: authentication failed")
	n.idle()

	with(password, back, password+"d")
	arguments := iscsitest.Arguments(t)
	var log bytes.Buffer
	n.volumes.cfg.ISCSI.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	must(t, os.WriteFile(filepath.Join(n.mount(pod("u5", lun(0, chap))).HostPath, "file"), []byte("kept"), 0o600))
	if given := arguments(); strings.Contains(given+log.String(), password) || !strings.Contains(given, "--login") {
		t.Errorf("iscsiadm was given %s; the log has %s", given, &log)
	}
	for _, file := range iscsitest.Records(t) {
		if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("record %s: %v, %v", file, st.Mode(), err)
		}
	}
	n.gone("u5")
	n.idle()
}

// What a target has not is told of by name, and found when it is there. F110
func TestDisksThatAreNotThere(t *testing.T) {
	n := serveDisks(t, 0)
	n.fails(pod("u1", lun(7)), "iSCSI target iqn.2026-01.example:disks at 127.0.0.2:3260, LUN 7: the target has no disk as LUN 7 for this node's initiator")
	n.mount(pod("u2", lun(0)))
	n.fails(pod("u3", lun(7)), "the target has no disk as LUN 7")
	n.target.Disk(7, 16<<20)
	n.mount(pod("u3", lun(7)))
	n.gone("u2")
	n.gone("u3")
	n.idle()
	n.fails(pod("u4", lun(0, func(s *v1.ISCSIVolumeSource) { s.IQN = "iqn.2026-01.example:none" })),
		"portal 127.0.0.2:3260 has no such target for this node's initiator: it has iqn.2026-01.example:disks")
	n.fails(pod("u5", lun(0, func(s *v1.ISCSIVolumeSource) { s.TargetPortal = "127.0.0.2:3999" })), "this node does not reach portal 127.0.0.2:3999, or nothing listens there")
	n.fails(pod("u6", lun(0, func(s *v1.ISCSIVolumeSource) { s.ISCSIInterface = "none" })), "reading iSCSI interface none of this node: iscsiadm: ")
	t.Setenv("PATH", t.TempDir())
	n.fails(pod("u7", lun(0)), "iscsiadm is not on this node: install open-iscsi (iscsi-initiator-utils), and have iscsid run")
}

// A node goes by the name that a volume gives its initiator, by an interface of the volume's own; and is logged in at all portals
// of which one is enough. F110
func TestInitiatorsAndPortals(t *testing.T) {
	n := serveDisks(t, 0)
	named := func(s *v1.ISCSIVolumeSource) {
		name := "iqn.2026-01.example:another"
		s.InitiatorName, s.Portals = &name, []string{otherPortal, "127.0.0.2"}
	}
	at := n.mount(pod("u1", lun(0, named))).HostPath
	n.sessions(2)
	for _, s := range iscsitest.Sessions(t) {
		dir := filepath.Join("/sys/class/iscsi_session", s)
		if got := read(t, filepath.Join(dir, "initiatorname")) + read(t, filepath.Join(dir, "ifacename")); got != "iqn.2026-01.example:another\n127.0.0.2:3260:data\n" {
			t.Errorf("%s goes by %q", s, got)
		}
	}
	must(t, os.WriteFile(filepath.Join(at, "file"), []byte("kept"), 0o600))
	n.gone("u1")
	n.sessions(0)
	absent := func(s *v1.ISCSIVolumeSource) { s.TargetPortal, s.Portals = "127.0.0.2:3999", []string{otherPortal} }
	if got := read(t, filepath.Join(n.mount(pod("u2", lun(0, absent))).HostPath, "file")); got != "kept" {
		t.Errorf("by the other portal a pod reads %q", got)
	}
	n.sessions(1)
	n.gone("u2")
	n.sessions(0)
}

// A session that the node has for others is used and left, and nothing that is mounted loses its disk. F110
func TestSessionsOfOthers(t *testing.T) {
	n := serveDisks(t, 0, 1)
	iscsitest.Admin(t, "-m", "discovery", "-t", "sendtargets", "-p", firstPortal)
	iscsitest.Admin(t, "-m", "node", "-T", targetName, "-p", firstPortal, "--login")
	logout := func() {
		iscsitest.Admin(t, "-m", "node", "-T", targetName, "-p", firstPortal, "--logout")
		iscsitest.Admin(t, "-m", "node", "-T", targetName, "-o", "delete")
		iscsitest.Admin(t, "-m", "discoverydb", "-t", "sendtargets", "-p", firstPortal, "-o", "delete")
	}
	n.mount(pod("u1", lun(0)))
	n.gone("u1")
	n.sessions(1)
	logout()

	n.mount(pod("u2", lun(0)))
	global := filepath.Join(n.volumes.kubelet(), "plugins/kubernetes.io/iscsi/default", targetName, "lun-0")
	elsewhere := t.TempDir()
	must(t, unix.Mount(global, elsewhere, "", unix.MS_BIND, ""))
	err := n.volumes.UnmountAll(t.Context(), "u2")
	if want := "something of it is mounted on this node still, at " + elsewhere; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.sessions(1)
	must(t, os.WriteFile(filepath.Join(elsewhere, "file"), nil, 0o600))
	must(t, unix.Unmount(elsewhere, 0))
	n.gone("u2")
	n.idle()
}

// logsIn is set in a process that mounts a disk for a pod, as an agent that is killed does.
const logsIn = "KEELSON_TEST_LOGS_IN"

func agentKilled() bool {
	dir := os.Getenv(logsIn)
	if dir == "" {
		return false
	}
	v := New(Config{Paths: agent.Paths{State: filepath.Join(dir, "state"), Run: filepath.Join(dir, "run")}, Objects: fake.NewCluster()})
	_, err := v.MountAll(context.Background(), pod("u1", lun(0)))
	fmt.Println(err)
	return true
}

// An agent that is killed at any moment leaves nothing that the next one does not take away. F110
func TestAgentsThatAreKilled(t *testing.T) {
	n := serveDisks(t, 0)
	iscsitest.Arguments(t)
	for about, moment := range map[string]struct {
		kills    string      // after this is done
		cond     func() bool // or when this is so
		sessions int         // that are there then
	}{
		"the pod has a record":  {cond: func() bool { return exists(filepath.Join(n.volumes.podDir("u1"), "iscsi", "data.json")) }},
		"the target was found":  {kills: "nonpersistent"},
		"iscsiadm has a record": {kills: "-o new"},
		"there is a session":    {kills: "--login", sessions: 1},
		"there is a place to mount at": {sessions: 1, cond: func() bool {
			return exists(filepath.Join(n.volumes.kubelet(), "plugins/kubernetes.io/iscsi/default", targetName, "lun-0"))
		}},
	} {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), logsIn+"="+filepath.Dir(n.volumes.cfg.Paths.State))
		if moment.kills != "" {
			cmd.Env = append(cmd.Env, iscsitest.Kills+"="+moment.kills)
		}
		must(t, cmd.Start())
		if moment.cond != nil {
			iscsitest.Until(t, func() error {
				if moment.cond() {
					return nil
				}
				return errors.New("waiting until " + about)
			})
			must(t, cmd.Process.Kill())
		}
		if err := cmd.Wait(); err == nil {
			t.Errorf("the agent was not killed when %s", about)
		}
		if have := len(iscsitest.Sessions(t)); have < moment.sessions {
			t.Errorf("when %s there are %d sessions", about, have)
		}
		n.volumes = New(n.volumes.cfg)
		iscsitest.Until(t, func() error { return n.volumes.UnmountAll(t.Context(), "u1") }) // what is asked of iscsid ends first
		n.gone("u1")
		n.idle()
		if left := iscsitest.Records(t); len(left) > 0 {
			t.Errorf("killed when %s, it left %q", about, left)
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// Of a node that leaves its cluster with pods that have disks nothing stays but what others have: no session, record, interface or
// password. What is mounted keeps its disk until it is not. F110
func TestTargetsThatANodeLeaves(t *testing.T) {
	n := serveDisks(t, 0, 1)
	const password, back = "of-the-initiator-1", "of-the-target-0001"
	n.target.Authenticate("user", password, "target", back)
	n.cluster.Put(&v1.Secret{ObjectMeta: named("chap", "s1"), Type: "kubernetes.io/iscsi-chap", Data: map[string][]byte{
		"node.session.auth.username": []byte("user"), "node.session.auth.password": []byte(password),
		"node.session.auth.username_in": []byte("target"), "node.session.auth.password_in": []byte(back)}})
	foreign := iscsitest.Serve(t, "iqn.2026-01.example:foreign", "127.0.0.4:3260")
	foreign.Disk(0, 16<<20)
	admin := func(args ...string) {
		t.Helper()
		iscsitest.Admin(t, append([]string{"-m", "node", "-T", foreign.Name, "-p", "127.0.0.4:3260,1", "-I", "default"}, args...)...)
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
	n.mount(pod("u1", lun(0, chap)))
	n.mount(pod("u2", lun(1, chap, another)))
	n.sessions(4)

	elsewhere := t.TempDir()
	must(t, unix.Mount(filepath.Join(n.volumes.kubelet(), "plugins/kubernetes.io/iscsi/default", targetName, "lun-0"), elsewhere, "", unix.MS_BIND, ""))
	for _, dir := range []string{n.volumes.kubelet(), n.volumes.cfg.Paths.State} {
		must(t, unmountBelow(t.Context(), dir))
	}
	remove := func() error { return Remove(t.Context(), n.volumes.kubelet(), n.volumes.cfg.ISCSI) }
	err := remove()
	if want := "something of it is mounted on this node still, at " + elsewhere; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.sessions(2)
	must(t, unix.Unmount(elsewhere, 0))
	must(t, errors.Join(remove(), remove()))
	n.sessions(1)
	if left := iscsitest.Records(t); !slices.Equal(left, others) {
		t.Errorf("records of iscsiadm: %q, want those of others, %q", left, others)
	}
}

// A portal that is gone holds nobody for longer than a deadline: not who mounts, and not who unmounts what has yet to be written;
// which goes when the kernel has given it up. F110
func TestPortalsThatHang(t *testing.T) {
	n := serveDisks(t, 0)
	at := n.mount(pod("u1", lun(0))).HostPath
	f, err := os.Create(filepath.Join(at, "new"))
	must(t, err)
	mend := iscsitest.Cut(t, "127.0.0.2")
	_, err = f.Write(make([]byte, 1<<20)) // into the kernel's memory
	must(t, errors.Join(err, f.Close()))

	n.volumes.cfg.ISCSI.Patience = 4 * time.Second
	n.volumes = New(n.volumes.cfg)
	start := time.Now()
	_, err = n.volumes.MountAll(t.Context(), pod("u2", volume("data", v1.VolumeSource{ISCSI: &v1.ISCSIVolumeSource{TargetPortal: "127.0.0.2", IQN: "iqn.2026-01.example:more"}})))
	if want := "asking portal 127.0.0.2:3260 for its targets: portal 127.0.0.2:3260 did not answer within 4s"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	n.gone("u2")
	t.Logf("another pod was refused after %s", time.Since(start).Round(time.Millisecond))
	start = time.Now()
	err = n.volumes.UnmountAll(t.Context(), "u1")
	t.Logf("unmounting, after %s: %v", time.Since(start).Round(time.Millisecond), err)
	n.volumes.cfg.ISCSI.Patience = time.Minute
	n.volumes = New(n.volumes.cfg)
	iscsitest.Until(t, func() error { return n.volumes.UnmountAll(t.Context(), "u1") })
	t.Logf("unmounted after %s", time.Since(start).Round(time.Second))
	n.gone("u1")
	n.idle()
	mend()
}
