package keyrotation_test

import (
	"context"
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// A backup that was made before a rotation is restored after it. The token in a Secret is signed
// again. A token that belongs to another Secret is not changed.
func TestTokensOfARemovedKey(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.createTokenSecret(t)
	old := p.readTokenSecret(t)
	other := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "others",
		Annotations: map[string]string{v1.ServiceAccountNameKey: "default"}},
		Type: v1.SecretTypeServiceAccountToken, Data: map[string][]byte{v1.ServiceAccountTokenKey: []byte(old)}}
	if _, err := p.Client("cp1").CoreV1().Secrets("default").Create(context.Background(), other,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	file := p.Backup("cp1")
	p.requestRotation(t, "cp1", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey), Keep: "0s"})
	p.requestRotation(t, "cp1", api.ClusterRotate{Force: true})
	now := p.awaitRotation(t, "cp1", rotation.ServiceAccountKey)
	p.StopReplica("cp1")
	if _, err := recovery.Restore(p.Members["cp1"].Config.Dir(), file, recovery.RestoreOptions{Replace: true}); err !=
		nil {
		t.Fatal(err)
	}
	p.Restart("cp1")
	servertest.Eventually(t, func() error {
		text := p.readTokenSecret(t)
		if key := pki.ParseKeyID(text); key != now.New {
			return fmt.Errorf("the token in the Secret is signed with key %s, want %s", key, now.New)
		}
		return p.authenticateWithToken("cp1", text)
	})
	have, err := p.Client("cp1").CoreV1().Secrets("default").Get(context.Background(), "others", metav1.GetOptions{})
	if err != nil || string(have.Data[v1.ServiceAccountTokenKey]) != old {
		t.Errorf("the token of another Secret was replaced: %v", err)
	}
}
