package operator

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
)

// serveKeys answers GET /cluster/keys with the keys of all members and the last rotation. With
// POST, it first starts, forces or aborts a rotation, as the ClusterRotate in the body requests.
// With ?local=true, it answers with the keys of this replica.
func (v *API) serveKeys(w http.ResponseWriter, req *http.Request, o *operation) {
	if !requireMethod(w, req, http.MethodGet, http.MethodPost) {
		return
	}
	if req.Method == http.MethodPost && !v.changeKeys(w, req, o) {
		return
	}
	if local, _ := strconv.ParseBool(req.URL.Query().Get("local")); local {
		clusterhttp.WriteJSON(w, api.ClusterKeys{Replicas: []api.ClusterKeyHolder{v.config.Keys.OwnReport()}})
		return
	}
	out, err := v.config.Keys.Report(req.Context(), req.Method != http.MethodGet)
	if err == nil {
		out.Removed, err = v.config.Members.ListRemovedWithValidKeys(req.Context(), out.Replicas)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	for i := range out.Replicas { // only replicas need these lists
		out.Replicas[i].Nodes, out.Replicas[i].Users = nil, nil
	}
	clusterhttp.WriteJSON(w, out)
}

// changeKeys starts, forces or aborts a rotation, as the api.ClusterRotate in the body of req
// requests. If that fails, it answers the request with the error and returns false.
func (v *API) changeKeys(w http.ResponseWriter, req *http.Request, o *operation) bool {
	var q api.ClusterRotate
	if !decodePost(w, req, &q) {
		return false
	}
	o.object, o.attributes = q.Kind, []any{"abort", q.Abort, "force", q.Force, "keep", q.Keep}
	ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
	defer cancel()
	var err error
	if q.Dismiss != "" {
		o.verb, o.object, o.attributes = "dismiss", q.Dismiss, nil
		if q != (api.ClusterRotate{Dismiss: q.Dismiss}) {
			err = clusterhttp.Refuse(http.StatusBadRequest, errors.New("dismiss excludes all other fields"))
		} else {
			err = v.config.Members.DismissRemovedMember(ctx, q.Dismiss)
		}
	} else {
		err = v.config.Keys.Request(ctx, q, api.CallerOf(req.Context()).User.Name)
	}
	if err != nil {
		writeError(w, err)
	}
	return err == nil
}

// serveKubeconfig answers POST /cluster/kubeconfig with the cluster CAs. If the request contains a
// CSR, the response also contains a renewed certificate.
func (v *API) serveKubeconfig(w http.ResponseWriter, req *http.Request, o *operation) {
	var q api.ClusterKubeconfig
	if !decodePost(w, req, &q) {
		return
	}
	out := api.ClusterKubeconfigResult{CA: v.config.CA.PEM()}
	if len(q.CSR) > 0 {
		caller := api.CallerOf(req.Context())
		o.object = caller.User.Name
		leaf, err := v.callerCertificate(req, caller)
		if err == nil {
			out.Certificate, err = v.config.CA.SigningCA().Renew(q.CSR, leaf, time.Now())
		}
		if err != nil {
			clusterhttp.WriteError(w, http.StatusBadRequest, fmt.Errorf("csr: %w", err))
			return
		}
	}
	clusterhttp.WriteJSON(w, out)
}

// callerCertificate returns the client certificate with which the caller has authenticated. It
// returns an error if the caller has authenticated in another way, or impersonates another user.
func (v *API) callerCertificate(req *http.Request, caller api.Caller) (*x509.Certificate, error) {
	if req.TLS == nil || len(req.TLS.PeerCertificates) == 0 {
		return nil,
			fmt.Errorf("%s has not authenticated with a client certificate of the cluster: no certificate can be "+
				"renewed", caller.User.Name)
	}
	leaf := req.TLS.PeerCertificates[0]
	if caller.User.Name != leaf.Subject.CommonName || caller.Sender.Name != caller.User.Name ||
		!v.config.AuthenticatedBy(caller.Sender, leaf) {
		return nil,
			fmt.Errorf("%s has not authenticated with the client certificate of this connection: no certificate can "+
				"be renewed", caller.User.Name)
	}
	if err := v.config.CA.VerifyClient(leaf); err != nil {
		return nil, fmt.Errorf("the client certificate of %s is not from the cluster: %w", caller.User.Name, err)
	}
	return leaf, nil
}
