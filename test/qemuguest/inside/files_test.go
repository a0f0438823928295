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
	"keelson.dev/keelson/internal/await"
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

// nfsServer is a worker with a kernel that serves a folder by NFS, to the worker itself.
type nfsServer struct {
	*testing.T
	ctx        context.Context
	host       lab.Host
	dir        string // served, with a folder data
	core       *typed.CoreV1Client
	hangsSince time.Time // since when it hangs
}

// namespace of the pods that use it.
const namespace = "files"

func startNFSServer(t *testing.T, l *lab.Lab) *nfsServer {
	t.Helper()
	h, err := l.Host("w1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*soon)
	t.Cleanup(cancel)
	f := &nfsServer{T: t, ctx: ctx, host: h, dir: t.TempDir(), core: newClient(t)}
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
		t.Fatalf("the file server's output is %q (%v)", string(line)+string(rest), err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	return f
}

// createObject repeats a request until it succeeds: on a machine as slow as this one, requests miss
// the server's deadlines.
func createObject[T any](f *nfsServer, o T, do func(context.Context, T, metav1.CreateOptions) (T, error)) {
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

// createPod creates a pod with the volume at /files.
func (f *nfsServer) createPod(name string, source v1.VolumeSource, script string) {
	f.Helper()
	p := newPod(name, "", "", "sh", "-c", script)
	second := int64(1)
	p.Spec.TerminationGracePeriodSeconds = &second // without any a pod is forgotten at once, whatever its node is about
	p.Spec.Volumes = []v1.Volume{{Name: "files", VolumeSource: source}}
	p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "files", MountPath: "/files"}}
	createObject(f, p, f.core.Pods(namespace).Create)
}

func (f *nfsServer) awaitCondition(cond func() error) {
	f.Helper()
	await.Until(f.ctx, f.T, 2*soon, 250*time.Millisecond, "the pods of the file server", cond)
}

// awaitPhase waits until a pod is in a phase and returns its UID.
func (f *nfsServer) awaitPhase(name string, want v1.PodPhase) (uid types.UID) {
	f.Helper()
	f.awaitCondition(func() error {
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

// deletePod deletes a pod.
func (f *nfsServer) deletePod(name string) {
	f.Helper()
	f.awaitCondition(func() error {
		if err := f.core.Pods(namespace).Delete(f.ctx, name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
			return err
		}
		return nil
	})
}

// checkFolders: pods mount a folder of an NFS server, inline and by a claim; a missing folder is
// named in the pod's event. In the end a pod is deleted while one of its processes waits for the
// server, which does not respond from then on.
func (f *nfsServer) checkFolders(t *testing.T) {
	if f == nil {
		t.Skip("needs: nfsd in the kernel of the guest")
	}
	ctx := f.ctx
	f.T = t
	createObject(f, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, f.core.Namespaces().Create)
	own := func(path string) v1.VolumeSource {
		return v1.VolumeSource{NFS: &v1.NFSVolumeSource{Server: "127.0.0.1", Path: path}}
	}
	size := v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	none := ""
	createObject(f, &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "files"},
		Spec: v1.PersistentVolumeSpec{Capacity: size,
			AccessModes:            []v1.PersistentVolumeAccessMode{v1.ReadWriteMany},
			MountOptions:           []string{"nfsvers=4.1", "noatime"},
			PersistentVolumeSource: v1.PersistentVolumeSource{NFS: own("/data").NFS}}},
		f.core.PersistentVolumes().Create)
	createObject(f, &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "files"},
		Spec: v1.PersistentVolumeClaimSpec{StorageClassName: &none,
			VolumeName: "files", AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteMany},
			Resources: v1.VolumeResourceRequirements{Requests: size}}},
		f.core.PersistentVolumeClaims(namespace).Create)

	f.createPod("writer", own("/data"),
		"echo of the writer > /files/greeting; exec 3>/files/big; while dd if=/dev/zero "+
			"bs=4k count=1 >&3; do :; done; exec sleep 1000")
	f.createPod("absent", own("/absent"), "true")
	f.createPod("reader",
		v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "files"}},
		"until grep writer /files/greeting; do :; done; grep ' /files nfs4 .*noatime.*vers=4.1' /proc/mounts && echo "+
			"of the reader > /files/answer")
	f.awaitPhase("reader", v1.PodSucceeded)
	if said, err := os.ReadFile(filepath.Join(f.dir, "data", "answer")); err != nil ||
		string(said) != "of the reader\n" {
		t.Errorf("the server has %q, %v", said, err)
	}
	f.awaitCondition(func() error {
		list, err := f.core.Events(namespace).List(ctx,
			metav1.ListOptions{FieldSelector: "involvedObject.name=absent,reason=FailedMount"})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if strings.Contains(e.Message, "NFS 127.0.0.1:/absent: server 127.0.0.1 exports no /absent") {
				return nil
			}
		}
		return fmt.Errorf("events of a pod with a missing folder: %v", list.Items)
	})
	f.deletePod("absent")
	f.deletePod("reader")

	f.awaitPhase("writer", v1.PodRunning)
	f.applyRules("table inet cut {\nchain input {\ntype filter hook input priority 0; tcp dport 2049 drop; tcp " +
		"sport 2049 drop\n}\n}")
	f.deletePod("writer")
	f.hangsSince = time.Now()
}

// awaitPodDeleted waits until nothing is left of the deleted pod.
func (f *nfsServer) awaitPodDeleted(t *testing.T) {
	if f == nil || f.hangsSince.IsZero() {
		t.Skip("needs: a server that hangs")
	}
	f.T = t
	f.awaitCondition(func() error {
		_, err := f.core.Pods(namespace).Get(f.ctx, "writer", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, errors.New("the pod still exists"))
	})
	t.Logf("a pod with a hung server was deleted after %s", time.Since(f.hangsSince).Round(time.Second))
	f.applyRules("delete table inet cut")
	if said, err := os.ReadFile(filepath.Join(f.dir, "data", "greeting")); err != nil ||
		string(said) != "of the writer\n" {
		t.Errorf("the server has %q, %v", said, err)
	}
	log, err := os.ReadFile(f.host.LogFile())
	if err != nil || !strings.Contains(string(log),
		"a killed container does not exit: aborting the I/O of its pod to file servers") {
		t.Errorf("no process of the pod waited for the server (%v)", err)
	}
}

// applyRules changes the packet filter of the worker's kernel.
func (f *nfsServer) applyRules(text string) {
	f.Helper()
	if out, err := f.host.Command(f.ctx, "nft", text).CombinedOutput(); err != nil {
		f.Fatalf("nft: %v: %s", err, out)
	}
}
