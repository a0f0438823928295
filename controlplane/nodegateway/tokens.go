package nodegateway

import (
	"context"
	"errors"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/client"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// maxTokens bounds the concurrent token requests of one node; the agent retries further ones.
const maxTokens = 64

// tokenRequest creates a service account token bound to a pod, with the node's identity, and sends
// it to the agent. It does not block.
func (x *session) tokenRequest(m *fleetv1.TokenRequest) {
	if err := checkNames(append(m.Audiences, m.Namespace, m.ServiceAccount, m.PodName, m.PodUid)...); err != nil {
		x.answerToken(m.Id, nil, err)
		return
	}
	x.mu.Lock()
	busy := x.tokens >= maxTokens
	if !busy {
		x.tokens++
	}
	x.mu.Unlock()
	if busy {
		x.answerToken(m.Id, nil, errors.New("too many token requests at once"))
		return
	}
	ctx, cancel := context.WithTimeout(x.work.ctx, 10*time.Second)
	x.srv.children.Go(func() {
		defer cancel()
		body := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			Audiences:      m.Audiences,
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: m.PodName, UID: types.UID(m.PodUid)},
		}}
		if m.ExpirationSeconds > 0 {
			body.Spec.ExpirationSeconds = &m.ExpirationSeconds
		}
		got, err := client.Sub[*v1.ServiceAccount](ctx, x.api, m.Namespace, m.ServiceAccount, "token", body)
		x.mu.Lock()
		x.tokens--
		x.mu.Unlock()
		x.answerToken(m.Id, got, err)
	})
}

func (x *session) answerToken(id uint64, got *authenticationv1.TokenRequest, err error) {
	t := &fleetv1.Token{Id: id}
	if err != nil {
		t.Error = err.Error()
	} else {
		t.Token, t.ExpiresUnix = got.Status.Token, got.Status.ExpirationTimestamp.Unix()
	}
	x.post(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Token{Token: t}})
}
