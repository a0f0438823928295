package report

import (
	"context"
	"errors"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// maxTokens is the maximum number of concurrent token requests of one node. The agent retries
// further requests.
const maxTokens = 64

// HandleTokenRequest creates a service account token that is bound to a pod, with the node's
// identity, and sends it to the agent. It does not block.
func (r *Reporter) HandleTokenRequest(m *fleetv1.TokenRequest) {
	if err := wire.CheckNameLengths(append(m.Audiences, m.Namespace, m.ServiceAccount, m.PodName,
		m.PodUid)...); err != nil {
		r.sendToken(m.Id, nil, err)
		return
	}
	r.mu.Lock()
	busy := r.pendingTokens >= maxTokens
	if !busy {
		r.pendingTokens++
	}
	r.mu.Unlock()
	if busy {
		r.sendToken(m.Id, nil, errors.New("too many token requests at once"))
		return
	}
	ctx, cancel := context.WithTimeout(r.writes.ctx, 10*time.Second)
	r.cfg.Lifetime.Go(func() {
		defer cancel()
		body := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			Audiences: m.Audiences,
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: m.PodName,
				UID: types.UID(m.PodUid)},
		}}
		if m.ExpirationSeconds > 0 {
			body.Spec.ExpirationSeconds = &m.ExpirationSeconds
		}
		got, err := client.Sub[*v1.ServiceAccount](ctx, r.api, m.Namespace, m.ServiceAccount, "token", body)
		r.mu.Lock()
		r.pendingTokens--
		r.mu.Unlock()
		r.sendToken(m.Id, got, err)
	})
}

func (r *Reporter) sendToken(id uint64, got *authenticationv1.TokenRequest, err error) {
	t := &fleetv1.Token{Id: id}
	if err != nil {
		t.Error = err.Error()
	} else {
		t.Token, t.ExpiresUnix = got.Status.Token, got.Status.ExpirationTimestamp.Unix()
	}
	r.session.QueueMessage(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Token{Token: t}})
}
