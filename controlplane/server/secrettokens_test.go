package server

import (
	"context"
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/rotation"
)

// A backup of before an exchange, restored after it: the token in a Secret is signed anew, and one that is of another Secret
// stays as somebody has put it there.
func TestTokensOfALostKey(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.kept(t)
	old := p.ofSecret(t)
	other := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "others", Annotations: map[string]string{v1.ServiceAccountNameKey: "default"}},
		Type: v1.SecretTypeServiceAccountToken, Data: map[string][]byte{v1.ServiceAccountTokenKey: []byte(old)}}
	if _, err := p.client("cp1").CoreV1().Secrets("default").Create(context.Background(), other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	file := p.backup("cp1")
	p.begins(t, "cp1", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey), Keep: "0s"})
	p.begins(t, "cp1", api.ClusterRotate{Force: true})
	now := p.rotated(t, "cp1", rotation.ServiceAccountKey)
	p.stop("cp1")
	if _, err := recovery.Restore(p.members["cp1"].cfg.Dir(), file, recovery.RestoreOptions{Replace: true}); err != nil {
		t.Fatal(err)
	}
	p.again("cp1")
	eventually(t, func() error {
		text := p.ofSecret(t)
		if key := pki.KeyIDOf(text); key != now.New {
			return fmt.Errorf("the token of the Secret is by key %s, want %s", key, now.New)
		}
		return p.asToken("cp1", text)
	})
	have, err := p.client("cp1").CoreV1().Secrets("default").Get(context.Background(), "others", metav1.GetOptions{})
	if err != nil || string(have.Data[v1.ServiceAccountTokenKey]) != old {
		t.Errorf("the token that is of another Secret was replaced, or %v", err)
	}
}
