//go:build guest

package inside

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"

	"keelson.dev/keelson/agent/volume/nfs/nfstest"
	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
)

// serves is set in a process on the worker that serves a folder until its input ends.
const serves = "KEELSON_TEST_SERVES"

// TestServe is that process.
func TestServe(t *testing.T) {
	dir := os.Getenv(serves)
	if dir == "" {
		t.Skip("needs: to be started by another test")
	}
	nfstest.Serve(t, dir, "127.0.0.1:2049")
	fmt.Println("serving")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// fileServer is what a worker is besides: its kernel serves a folder, to itself.
type fileServer struct {
	*testing.T
	ctx  context.Context
	host lab.Host
	dir  string // served, with a folder data
	core *typed.CoreV1Client
	cut  time.Time // since when it hangs
}

// namespace of the pods that use it.
const namespace = "files"

func serve(t *testing.T, l *lab.Lab) *fileServer {
	t.Helper()
	h, err := l.Host("w1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*soon)
	t.Cleanup(cancel)
	f := &fileServer{T: t, ctx: ctx, host: h, dir: t.TempDir(), core: client(t)}
	if err := errors.Join(os.Chmod(f.dir, 0o777), os.Mkdir(filepath.Join(f.dir, "data"), 0o777)); err != nil {
		t.Fatal(err)
	}
	server := h.Command(context.Background(), "/guest/inside.test", "-test.run", "^TestServe$", "-test.timeout", "5m")
	server.Env = append(os.Environ(), serves+"="+f.dir, nfstest.Needed+"=1")
	server.Stderr = os.Stderr
	in, err := server.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), server.Wait()); err != nil {
			t.Errorf("the file server: %v", err)
		}
	})
	line := make([]byte, len("serving"))
	if _, err := io.ReadFull(out, line); err != nil || string(line) != "serving" {
		rest, _ := io.ReadAll(io.LimitReader(out, 4<<10))
		t.Fatalf("the file server says %q (%v)", string(line)+string(rest), err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	return f
}

// create asks until the API has it: a machine as slow as this one misses deadlines that a server has for strangers.
func create[T any](f *fileServer, o T, do func(context.Context, T, metav1.CreateOptions) (T, error)) {
	f.Helper()
	if err := wait.For(f.ctx, 250*time.Millisecond, func() error {
		_, err := do(f.ctx, o, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	}); err != nil {
		f.Fatal(err)
	}
}

// pod makes a pod with the volume at /files.
func (f *fileServer) pod(name string, source v1.VolumeSource, script string) {
	f.Helper()
	p := pod(name, "", "", "sh", "-c", script)
	second := int64(1)
	p.Spec.TerminationGracePeriodSeconds = &second // without any a pod is forgotten at once, whatever its node is about
	p.Spec.Volumes = []v1.Volume{{Name: "files", VolumeSource: source}}
	p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "files", MountPath: "/files"}}
	create(f, p, f.core.Pods(namespace).Create)
}

func (f *fileServer) until(cond func() error) {
	f.Helper()
	if err := wait.For(f.ctx, 250*time.Millisecond, cond); err != nil {
		f.Fatal(err)
	}
}

// phase waits for that of a pod.
func (f *fileServer) phase(name string, want v1.PodPhase) (uid types.UID) {
	f.Helper()
	f.until(func() error {
		p, err := f.core.Pods(namespace).Get(f.ctx, name, metav1.GetOptions{})
		if err == nil && p.Status.Phase != want {
			err = fmt.Errorf("pod %s is %s: %v", name, p.Status.Phase, p.Status.ContainerStatuses)
		}
		if err == nil {
			uid = p.UID
		}
		return err
	})
	return uid
}

// remove has a pod deleted.
func (f *fileServer) remove(name string) {
	f.Helper()
	f.until(func() error {
		if err := f.core.Pods(namespace).Delete(f.ctx, name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
			return err
		}
		return nil
	})
}

// folders: pods have a folder of an NFS server, by themselves and by a claim; a folder that is not there is told of by the
// pod's event. In the end a pod is deleted one of whose processes waits for the server, which hangs from then on.
func (f *fileServer) folders(t *testing.T) {
	if f == nil {
		t.Skip("needs: nfsd in the kernel of the guest")
	}
	ctx := f.ctx
	f.T = t
	create(f, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, f.core.Namespaces().Create)
	own := func(path string) v1.VolumeSource {
		return v1.VolumeSource{NFS: &v1.NFSVolumeSource{Server: "127.0.0.1", Path: path}}
	}
	size := v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	none := ""
	create(f, &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "files"}, Spec: v1.PersistentVolumeSpec{Capacity: size,
		AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteMany}, MountOptions: []string{"nfsvers=4.1", "noatime"},
		PersistentVolumeSource: v1.PersistentVolumeSource{NFS: own("/data").NFS}}}, f.core.PersistentVolumes().Create)
	create(f, &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "files"}, Spec: v1.PersistentVolumeClaimSpec{StorageClassName: &none,
		VolumeName: "files", AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteMany}, Resources: v1.VolumeResourceRequirements{Requests: size}}},
		f.core.PersistentVolumeClaims(namespace).Create)

	f.pod("writer", own("/data"), "echo of the writer > /files/greeting; exec 3>/files/big; while dd if=/dev/zero bs=4k count=1 >&3; do :; done; exec sleep 1000")
	f.pod("absent", own("/absent"), "true")
	f.pod("reader", v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "files"}},
		"until grep writer /files/greeting; do :; done; grep ' /files nfs4 .*noatime.*vers=4.1' /proc/mounts && echo of the reader > /files/answer")
	f.phase("reader", v1.PodSucceeded)
	if said, err := os.ReadFile(filepath.Join(f.dir, "data", "answer")); err != nil || string(said) != "of the reader\n" {
		t.Errorf("the server has %q, %v", said, err)
	}
	f.until(func() error {
		list, err := f.core.Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=absent,reason=FailedMount"})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if strings.Contains(e.Message, "NFS 127.0.0.1:/absent: server 127.0.0.1 exports no /absent") {
				return nil
			}
		}
		return fmt.Errorf("events of a pod whose folder is not there: %v", list.Items)
	})
	f.remove("absent")
	f.remove("reader")

	f.phase("writer", v1.PodRunning)
	f.nft("table inet cut {\nchain input {\ntype filter hook input priority 0; tcp dport 2049 drop; tcp sport 2049 drop\n}\n}")
	f.remove("writer")
	f.cut = time.Now()
}

// ends waits until nothing is left of the pod that was deleted.
func (f *fileServer) ends(t *testing.T) {
	if f == nil || f.cut.IsZero() {
		t.Skip("needs: a server that hangs")
	}
	f.T = t
	f.until(func() error {
		_, err := f.core.Pods(namespace).Get(f.ctx, "writer", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, errors.New("the pod is there"))
	})
	t.Logf("a pod whose server hangs was seen to be gone %s later", time.Since(f.cut).Round(time.Second))
	f.nft("delete table inet cut")
	if said, err := os.ReadFile(filepath.Join(f.dir, "data", "greeting")); err != nil || string(said) != "of the writer\n" {
		t.Errorf("the server has %q, %v", said, err)
	}
	log, err := os.ReadFile(f.host.LogFile())
	if err != nil || !strings.Contains(string(log), "what a file server of the pod was waited for is given up") {
		t.Errorf("no process of the pod waited for the server (%v)", err)
	}
}

// nft changes what the worker's kernel lets through.
func (f *fileServer) nft(text string) {
	f.Helper()
	if out, err := f.host.Command(f.ctx, "nft", text).CombinedOutput(); err != nil {
		f.Fatalf("nft: %v: %s", err, out)
	}
}
