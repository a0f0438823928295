package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/volume/remote"
	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/csi/privatemounts"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/reservedspace"
)

func TestMain(m *testing.M) {
	if !remote.Main() && !runWriter() && !agentKilled() {
		privatemounts.Main(m)
	}
}

func requireNoError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newVolumes(t *testing.T) (*Volumes, *fake.Cluster, string) {
	privatemounts.SkipUnlessPrivate(t)
	dir, c := t.TempDir(), fake.NewCluster()
	t.Cleanup(func() {
		if err := unmountBelow(context.Background(), dir); err != nil {
			t.Error(err)
		}
	})
	return New(Config{Paths: agent.Paths{State: filepath.Join(dir, "state"), Run: filepath.Join(dir, "run")},
		Objects: c}), c, dir
}

func newPod(uid string, volumes ...v1.Volume) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", UID: types.UID(uid),
		Labels: map[string]string{"app": "web"}},
		Spec: v1.PodSpec{Volumes: volumes, ServiceAccountName: "sa", Containers: []v1.Container{{Name: "app"}}}}
}

func newVolume(name string, s v1.VolumeSource) v1.Volume {
	return v1.Volume{Name: name, VolumeSource: s}
}

func newConfigMap(name string, data map[string]string) *v1.ConfigMap {
	return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Data: data}
}

func mustRead(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	requireNoError(t, err)
	return string(b)
}

func fsType(t *testing.T, path string) string {
	t.Helper()
	var st syscall.Statfs_t
	requireNoError(t, syscall.Statfs(path, &st))
	if st.Type == 0x01021994 {
		return "tmpfs"
	}
	return "other"
}

// newPodOfEveryKind returns a pod with one volume of each kind that needs no claim.
func newPodOfEveryKind(c *fake.Cluster) *v1.Pod {
	c.Put(newConfigMap("cm", map[string]string{"key": "value", "other": "x"}),
		&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"},
			Data: map[string][]byte{"password": []byte("geheim")}})
	mode := int32(0o400)
	limit := resource.MustParse("1Mi")
	return newPod("u1",
		newVolume("disk", v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}),
		newVolume("ram",
			v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory, SizeLimit: &limit}}),
		newVolume("cm",
			v1.VolumeSource{
				ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "cm"},
					Items: []v1.KeyToPath{{Key: "key", Path: "deep/er/file", Mode: &mode}}}}),
		newVolume("secret", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "s"}}),
		newVolume("down",
			v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Items: []v1.DownwardAPIVolumeFile{{Path: "labels",
				FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}}}),
		newVolume("api", v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{
			{ServiceAccountToken: &v1.ServiceAccountTokenProjection{Path: "token", Audience: "a"}},
			{ConfigMap: &v1.ConfigMapProjection{LocalObjectReference: v1.LocalObjectReference{Name: "cm"},
				Items: []v1.KeyToPath{{Key: "other", Path: "other"}}}},
			{DownwardAPI: &v1.DownwardAPIProjection{Items: []v1.DownwardAPIVolumeFile{{Path: "namespace",
				FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.namespace"}}}}}}}}))
}

func TestEveryKind(t *testing.T) {
	v, c, dir := newVolumes(t)
	p := newPodOfEveryKind(c)
	m, err := v.MountAll(t.Context(), p)
	requireNoError(t, err)
	for name, want := range map[string]string{"cm/deep/er/file": "value", "secret/password": "geheim",
		"down/labels": `app="web"`, "api/token": "token:default/web:a", "api/other": "x", "api/namespace": "default"} {
		vol, file, _ := strings.Cut(name, "/")
		if got := mustRead(t, filepath.Join(m[vol].HostPath, file)); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
		if !m[vol].ReadOnly {
			t.Errorf("%s may be written", vol)
		}
	}
	if st, err := os.Stat(filepath.Join(m["cm"].HostPath, "deep/er/file")); err != nil || st.Mode().Perm() != 0o400 {
		t.Errorf("mode of an item: %v, %v", st.Mode(), err)
	}
	for _, vol := range []string{"secret", "api", "ram"} {
		if fsType(t, m[vol].HostPath) != "tmpfs" {
			t.Errorf("%s is not on a tmpfs", vol)
		}
	}
	if st, err := os.Stat(m["disk"].HostPath); err != nil || st.Mode().Perm() != 0o777 {
		t.Errorf("emptyDir: %v, %v", st.Mode(), err)
	}
	if err := os.WriteFile(filepath.Join(m["ram"].HostPath, "big"), make([]byte, 2<<20), 0o600); !errors.Is(err,
		syscall.ENOSPC) {
		t.Errorf("2 MiB in a tmpfs of 1 MiB: %v", err)
	}
	// A restarted agent finds everything, changes nothing, and removes all of it.
	requireNoError(t, os.WriteFile(filepath.Join(m["disk"].HostPath, "data"), []byte("kept"), 0o600))
	v2 := New(*v.cfg)
	m2, err := v2.MountAll(t.Context(), p)
	requireNoError(t, err)
	if mustRead(t, filepath.Join(m2["disk"].HostPath, "data")) != "kept" {
		t.Error("an emptyDir lost its content")
	}
	if pods, err := v2.Pods(); err != nil || !slices.Equal(pods, []types.UID{"u1"}) {
		t.Errorf("pods with volumes: %v, %v", pods, err)
	}
	for range 2 {
		requireNoError(t, v2.UnmountAll(t.Context(), "u1"))
	}
	requireNoError(t, v2.UnmountAll(t.Context(), "never-seen"))
	if pods, err := v2.Pods(); err != nil || len(pods) != 0 {
		t.Errorf("pods with volumes after all is gone: %v, %v", pods, err)
	}
	points, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	requireNoError(t, err)
	if len(points) != 1 { // one tmpfs for all secrets
		t.Errorf("%d mounts are left", len(points))
	}
	if err := v2.UnmountAll(t.Context(), "../.."); err == nil {
		t.Error("a uid that leads out of the folder was taken")
	}
}

func TestMissingObjectsAreNamed(t *testing.T) {
	v, c, _ := newVolumes(t)
	yes := true
	p := newPod("u1",
		newVolume("cfg",
			v1.VolumeSource{
				ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "absent"}}}),
		newVolume("sec", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "nowhere"}}),
		newVolume("data",
			v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"}}),
		newVolume("opt",
			v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{
				LocalObjectReference: v1.LocalObjectReference{Name: "absent"}, Optional: &yes}}))
	_, err := v.MountAll(t.Context(), p)
	want := `MountVolume.SetUp failed for volume "cfg" : configmap "default/absent" not found
MountVolume.SetUp failed for volume "data" : persistentvolumeclaim "default/disk" not found
MountVolume.SetUp failed for volume "sec" : secret "default/nowhere" not found`
	if err == nil || err.Error() != want {
		t.Fatalf("got\n%v\nwant\n%s", err, want)
	}
	c.Put(newConfigMap("absent", nil), &v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "nowhere"}},
		&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "disk"}})
	_, err = v.MountAll(t.Context(), p)
	if err == nil || err.Error() != `MountVolume.SetUp failed for volume "data" : persistentvolumeclaim `+
		`"default/disk" is not bound` {
		t.Errorf("unbound claim: %v", err)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
}

// A reader sees the old or the new version of all files, never a mixture. A refresh without changes
// writes nothing.
func TestRefreshIsAtomic(t *testing.T) {
	v, c, _ := newVolumes(t)
	version := func(i int) *v1.ConfigMap {
		data := map[string]string{"a": fmt.Sprint(i), "b": fmt.Sprint(i)}
		if i%2 == 0 {
			data["even"] = "yes"
		}
		return newConfigMap("cm", data)
	}
	c.Put(version(0))
	p := newPod("u1",
		newVolume("cm",
			v1.VolumeSource{
				ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}}}))
	m, err := v.MountAll(t.Context(), p)
	requireNoError(t, err)
	dir := m["cm"].HostPath
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			data, err := os.Readlink(filepath.Join(dir, dataLink))
			if err != nil {
				t.Errorf("no version: %v", err)
				return
			}
			a, errA := os.ReadFile(filepath.Join(dir, data, "a"))
			b, errB := os.ReadFile(filepath.Join(dir, data, "b"))
			if errors.Is(errA, os.ErrNotExist) || errors.Is(errB, os.ErrNotExist) {
				continue // removed meanwhile: this version is no longer current
			}
			if string(a) != string(b) {
				t.Errorf("a mixture: a=%q b=%q", a, b)
				return
			}
		}
	})
	for i := 1; i <= 100; i++ {
		c.Put(version(i))
		requireNoError(t, v.Refresh(t.Context(), p))
		if got := mustRead(t, filepath.Join(dir, "a")); got != fmt.Sprint(i) {
			t.Fatalf("after refresh %d: %q", i, got)
		}
		if _, err := os.Stat(filepath.Join(dir, "even")); (err == nil) != (i%2 == 0) {
			t.Fatalf("after refresh %d: even: %v", i, err)
		}
	}
	cancel()
	wg.Wait()
	before, _ := os.Readlink(filepath.Join(dir, dataLink))
	requireNoError(t, v.Refresh(t.Context(), p))
	if after, _ := os.Readlink(filepath.Join(dir, dataLink)); after != before {
		t.Error("an unchanged ConfigMap was written again")
	}
	// A crash leaves a version that is never visible; the next write removes it.
	requireNoError(t, os.Mkdir(filepath.Join(dir, "..crashed"), 0o755))
	c.Put(version(101))
	requireNoError(t, v.Refresh(t.Context(), p))
	if entries, _ := os.ReadDir(dir); len(entries) != 4 { // version, ..data, a, b
		t.Errorf("entries: %v", entries)
	}
}

func TestFSGroup(t *testing.T) {
	v, c, _ := newVolumes(t)
	p, g := newPodOfEveryKind(c), int64(4711)
	p.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &g}
	m, err := v.MountAll(t.Context(), p)
	requireNoError(t, err)
	for _, path := range []string{m["disk"].HostPath, m["ram"].HostPath, m["secret"].HostPath + "/password",
		m["api"].HostPath + "/token", m["cm"].HostPath + "/deep/er"} {
		st, err := os.Stat(path)
		requireNoError(t, err)
		if fileGroup(st) != g || st.Mode().Perm()&0o040 == 0 || st.IsDir() && st.Mode()&os.ModeSetgid == 0 {
			t.Errorf("%s: group %d, mode %s", path, fileGroup(st), st.Mode())
		}
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
}

func TestHostPathTypes(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	requireNoError(t, os.WriteFile(file, nil, 0o600))
	socket, disk, link := filepath.Join(dir, "s"), filepath.Join(dir, "disk"), filepath.Join(dir, "link")
	l, err := net.Listen("unix", socket)
	requireNoError(t, err)
	defer l.Close()
	privatemounts.SkipUnlessPrivate(t)
	requireNoError(t, publishDevice(disk))
	requireNoError(t, os.Symlink(disk, link))
	for _, c := range []struct {
		path string
		kind v1.HostPathType
		want string // "" = no error
	}{
		{dir, v1.HostPathDirectory, ""}, {file, v1.HostPathFile, ""}, {"/dev/null", v1.HostPathCharDev, ""},
		{socket, v1.HostPathSocket, ""}, {disk, v1.HostPathBlockDev, ""}, {link, v1.HostPathBlockDev, ""},
		{dir, v1.HostPathDirectoryOrCreate, ""},
		{file, v1.HostPathFileOrCreate, ""}, {socket, v1.HostPathUnset, ""}, {disk, v1.HostPathUnset, ""},
		{disk, v1.HostPathCharDev, "hostPath type check failed: " + disk + " is not a character device"},
		{socket, v1.HostPathFile, "hostPath type check failed: " + socket + " is not a file"},
		{file, v1.HostPathDirectoryOrCreate, "mkdir " + file + ": not a directory"},
		{dir, v1.HostPathFileOrCreate, "hostPath type check failed: " + dir + " is not a file"},
		{"/absent", v1.HostPathBlockDev, "hostPath type check failed: /absent is not a block device"},
		{filepath.Join(dir, "new/deep"), v1.HostPathDirectoryOrCreate, ""},
		{filepath.Join(dir, "newfile"), v1.HostPathFileOrCreate, ""},
		{filepath.Join(dir, "unset"), v1.HostPathUnset, ""},
		{file, v1.HostPathDirectory, "hostPath type check failed: " + file + " is not a directory"},
		{dir, v1.HostPathFile, "hostPath type check failed: " + dir + " is not a file"},
		{file, v1.HostPathSocket, "hostPath type check failed: " + file + " is not a socket file"},
		{"/dev/null", v1.HostPathBlockDev, "hostPath type check failed: /dev/null is not a block device"},
		{"/absent", v1.HostPathDirectory, "hostPath type check failed: /absent is not a directory"},
	} {
		_, err := hostPath(&v1.HostPathVolumeSource{Path: c.path, Type: &c.kind})
		if got := fmt.Sprint(err); c.want == "" && err != nil || c.want != "" && got != c.want {
			t.Errorf("%s as %q: %v", c.path, c.kind, err)
		}
	}
}

// withLocalDriver runs the local volume driver until the end of the test, and registers it.
func withLocalDriver(t *testing.T, v *Volumes, dir string) {
	t.Helper()
	socket := filepath.Join(dir, "plugins", local.DriverName, "csi.sock")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- local.New(local.Config{Root: filepath.Join(dir, "data"), Socket: socket, NodeID: "w1",
			KeepFree: reservedspace.Bytes(1 << 20)}).Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	v.cfg.CSI = csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(dir, "plugins")})
	// Its socket exists before it accepts connections.
	await.Until(t.Context(), t, await.Patience, time.Millisecond, "the driver", func() error {
		_, err := v.cfg.CSI.Driver(t.Context(), local.DriverName)
		return err
	})
}

// F110: a CSI volume is staged once for two pods, and its data outlives them. A crash of the agent
// between any two calls leaves nothing behind.
func TestClaimOnCSIVolume(t *testing.T) {
	v, c, dir := newVolumes(t)
	withLocalDriver(t, v, dir)
	c.Put(&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "disk", UID: "c1"},
		Spec:   v1.PersistentVolumeClaimSpec{VolumeName: "pv"},
		Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"},
			Spec: v1.PersistentVolumeSpec{AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
				ClaimRef: &v1.ObjectReference{Namespace: "default", Name: "disk", UID: "c1"},
				PersistentVolumeSource: v1.PersistentVolumeSource{
					CSI: &v1.CSIPersistentVolumeSource{Driver: local.DriverName, VolumeHandle: "vol-1"}}}})
	claim := newVolume("data",
		v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"}})
	one, err := v.MountAll(t.Context(), newPod("u1", claim))
	requireNoError(t, err)
	two, err := v.MountAll(t.Context(), newPod("u2", claim))
	requireNoError(t, err)
	requireNoError(t, os.WriteFile(filepath.Join(one["data"].HostPath, "f"), []byte("kept"), 0o600))
	if got := mustRead(t, filepath.Join(two["data"].HostPath, "f")); got != "kept" {
		t.Errorf("the second pod sees %q", got)
	}
	staging := v.stagingPath(csiSource{driver: local.DriverName, handle: "vol-1"})
	v = New(*v.cfg) // the agent is killed
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	if !isMountedNow(staging) || !isMountedNow(two["data"].HostPath) {
		t.Error("the end of one pod took the volume from the other")
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
	if isMountedNow(staging) {
		t.Error("the volume is still staged")
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
	again, err := v.MountAll(t.Context(), newPod("u3", claim))
	requireNoError(t, err)
	if got := mustRead(t, filepath.Join(again["data"].HostPath, "f")); got != "kept" {
		t.Errorf("data after the pods: %q", got)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u3"))
	// A crash between writing the record and calling the driver.
	requireNoError(t, writeRecord(filepath.Join(v.podDir("u4"), "csi", "data.json"),
		csiRecord{Driver: local.DriverName, Volume: "vol-1", Staging: staging,
			Target: filepath.Join(v.podDir("u4"), "csi", "data", "mount")}))
	requireNoError(t, v.UnmountAll(t.Context(), "u4"))
	// The driver no longer exists: a mounted volume is an error, an unmounted one is dropped.
	requireNoError(t, writeRecord(filepath.Join(v.podDir("u5"), "csi", "data.json"),
		csiRecord{Driver: "gone.example", Volume: "x", Staging: "/nowhere", Target: "/nowhere"}))
	requireNoError(t, v.UnmountAll(t.Context(), "u5"))
}

// A driver gets the requested pod information at publishing, not at staging, which is for all pods.
func TestDriversAreToldOfPods(t *testing.T) {
	v, _, _ := newVolumes(t)
	yes, hours := true, int64(7200)
	about := &storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{PodInfoOnMount: &yes,
		TokenRequests: []storagev1.TokenRequest{{Audience: "vault", ExpirationSeconds: &hours}}}}
	p := newPod("u1")
	staged := csi.Volume{VolumeContext: map[string]string{"size": "big"}}
	cv := staged
	requireNoError(t, v.csi.addPodInfo(t.Context(), &cv, p, about, false))
	if len(staged.VolumeContext) != 1 || cv.VolumeContext["size"] != "big" ||
		cv.VolumeContext["csi.storage.k8s.io/pod.uid"] != "u1" {
		t.Errorf("staged with %v, published with %v", staged.VolumeContext, cv.VolumeContext)
	}
	var tokens map[string]struct{ Token, ExpirationTimestamp string }
	requireNoError(t, json.Unmarshal([]byte(cv.VolumeContext["csi.storage.k8s.io/serviceAccount.tokens"]), &tokens))
	if got := tokens["vault"]; got.Token != "token:default/"+p.Name+":vault" ||
		!strings.HasSuffix(got.ExpirationTimestamp, "Z") {
		t.Errorf("tokens %+v", tokens)
	}
	plain := staged
	requireNoError(t, v.csi.addPodInfo(t.Context(), &plain, p, &storagev1.CSIDriver{}, false))
	requireNoError(t, v.csi.addPodInfo(t.Context(), &plain, p, nil, false))
	if len(plain.VolumeContext) != 1 {
		t.Errorf("a driver without podInfoOnMount gets volume context %v", plain.VolumeContext)
	}
}

func TestDriverMissing(t *testing.T) {
	v, c, dir := newVolumes(t)
	v.cfg.CSI = csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(dir, "plugins")})
	c.Put(&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "disk"},
		Spec: v1.PersistentVolumeClaimSpec{VolumeName: "pv"}},
		&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"},
			Spec: v1.PersistentVolumeSpec{ClaimRef: &v1.ObjectReference{Namespace: "default", Name: "disk"},
				PersistentVolumeSource: v1.PersistentVolumeSource{
					CSI: &v1.CSIPersistentVolumeSource{Driver: "gone.example",
						VolumeHandle: "x"}}}})
	_, err := v.MountAll(t.Context(), newPod("u1",
		newVolume("data",
			v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"}})))
	if err == nil || !strings.Contains(err.Error(),
		csi.ErrNoDriver.Error()+": gone.example (looked for in "+dir+"/plugins/*/csi.sock)") {
		t.Errorf("got %v", err)
	}
}

// A change of group never follows a symbolic link out of the volume.
func TestGroupStaysInside(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	dir := t.TempDir()
	outside := filepath.Join(dir, "outside")
	requireNoError(t, os.WriteFile(outside, nil, 0o600))
	vol := filepath.Join(dir, "vol")
	requireNoError(t, os.MkdirAll(filepath.Join(vol, "sub"), 0o700))
	requireNoError(t, os.Symlink(outside, filepath.Join(vol, "sub", "link")))
	g := int64(4711)
	p := newPod("u1")
	p.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &g}
	requireNoError(t, applyGroup(vol, p))
	st, err := os.Stat(outside)
	requireNoError(t, err)
	if fileGroup(st) == g || st.Mode().Perm() != 0o600 {
		t.Errorf("a file outside was changed: group %d, %s", fileGroup(st), st.Mode())
	}
	if st, err = os.Stat(filepath.Join(vol, "sub")); err != nil || fileGroup(st) != g ||
		st.Mode().Perm()&0o070 != 0o070 {
		t.Errorf("inside: %v, %v", st, err)
	}
}
