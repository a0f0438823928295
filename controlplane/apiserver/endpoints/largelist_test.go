package endpoints_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A list that is written item by item is complete in every media type, also if parts of the stored
// objects are omitted. The length in protobuf is that of the response.
func TestLargeListsAreComplete(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	const n = 40
	for i := range n {
		_, err := r.Admin().CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c-%02d", i)},
			Data:       map[string]string{"k": strings.Repeat("v", 8<<10)},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, media := range []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON} {
		cfg := r.ClientConfig("admin", api.GroupMasters)
		cfg.ContentType, cfg.AcceptContentTypes = media, media
		cs, err := kubernetes.NewForConfig(cfg)
		if err != nil {
			t.Fatal(err)
		}
		list, err := cs.CoreV1().ConfigMaps("default").List(ctx, metav1.ListOptions{})
		if err != nil || len(list.Items) != n {
			t.Errorf("%s: %d items, %v", media, len(list.Items), err)
			continue
		}
		for _, c := range list.Items {
			if len(c.Data["k"]) != 8<<10 || len(c.Annotations) > 0 {
				t.Errorf("%s: %s has %d bytes and annotations %v", media, c.Name, len(c.Data["k"]), c.Annotations)
			}
		}
	}
}
