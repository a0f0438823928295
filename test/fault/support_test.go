package fault

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// A support bundle of a real cluster has logs and metrics of every replica and node, and none of
// their secrets: keys of the cluster, tokens, Secrets, ConfigMaps, and data of pods.
func TestSupportBundle(t *testing.T) {
	ctx, ns, cs := context.Background(), testenv.Namespace(t), testenv.Client(t)
	const planted = "pL4nted-S3cret-of-the-bundle"
	secret := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": planted}}
	config := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Data: map[string]string{"k": planted}}
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: map[string]string{"vendor/key": planted}},
		Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c", Image: "nowhere.invalid/app:1", Args: []string{planted},
			Env: []v1.EnvVar{{Name: "DB", Value: planted}}}}}}
	_, err := cs.CoreV1().Secrets(ns).Create(ctx, secret, metav1.CreateOptions{})
	if err == nil {
		_, err = cs.CoreV1().ConfigMaps(ns).Create(ctx, config, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = cs.CoreV1().Pods(ns).Create(ctx, pod, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	secrets := map[string]string{"what was planted": planted,
		"the same in base64": base64.StdEncoding.EncodeToString([]byte(planted)),
		"a join token":       strings.TrimSpace(testenv.Kctl(t, "cluster", "token", "create"))}
	for _, key := range []string{"ca.key", "sa.key", "store.keys", "encryption.key"} {
		raw, err := os.ReadFile(filepath.Join(dataDirOf(t, "cp1"), "pki", key))
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Fields(string(raw))
		longest := ""
		for _, l := range lines {
			if len(l) > len(longest) && !strings.HasPrefix(l, "---") {
				longest = l
			}
		}
		secrets[key] = longest
	}
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	testenv.Kctl(t, "cluster", "support-bundle", file)
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[strings.TrimPrefix(h.Name, "b/")] = string(text)
	}
	for name, text := range files {
		for what, s := range secrets {
			if s == "" || strings.Contains(text, s) {
				t.Errorf("%s has %s", name, what)
			}
		}
	}
	for _, cp := range []string{"cp1", "cp2", "cp3"} {
		if at := "replicas/" + cp; !strings.Contains(files[at+"/daemon.log"], "level=INFO") ||
			!strings.Contains(files[at+"/metrics.txt"], "keelson_store_") ||
			!strings.Contains(files[at+"/settings.txt"], "advertise-address: 10.") {
			t.Errorf("of %s it has too little:\n%.300s", cp, files[at+"/settings.txt"])
		}
	}
	for _, w := range []string{"w1", "w2", "w3"} {
		if at := "nodes/" + w; !strings.Contains(files[at+"/agent.log"], "level=") ||
			!strings.Contains(files[at+"/metrics.txt"], "go_") {
			t.Errorf("of %s it has too little: %s", w, files["CONTENTS.txt"])
		}
	}
	if !strings.Contains(files["objects/pods.json"], "nowhere.invalid/app:1") ||
		strings.Contains(files["CONTENTS.txt"], "Missing:") {
		t.Errorf("pods or more are missing: %s", files["CONTENTS.txt"])
	}
}
