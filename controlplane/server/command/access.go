package command

import (
	"github.com/spf13/cobra"

	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/server"
)

// accessFlags adds what an operator may choose of authentication and authorization, under Kubernetes' names. finish
// checks what goes with what.
func accessFlags(c *cobra.Command, cfg *server.Config) (finish func() error) {
	anonymous := authenticationFlags(c, &cfg.Authentication)
	authorizationFlags(c, &cfg.Authorization)
	return func() error {
		if c.Flags().Changed("anonymous-auth") {
			cfg.Authentication.Anonymous = anonymous
		}
		if err := cfg.Authentication.Check(); err != nil {
			return err
		}
		return cfg.Authorization.Check()
	}
}

func authenticationFlags(c *cobra.Command, o *authnfile.Options) (anonymous *bool) {
	*o = authnfile.Defaults()
	f := c.Flags()
	f.StringVar(&o.ConfigFile, "authentication-config", "",
		"file with an AuthenticationConfiguration: issuers of OIDC tokens, and where anonymous requests may come; read again when it changes")
	anonymous = f.Bool("anonymous-auth", true, "let requests without credentials be system:anonymous")
	f.StringVar(&o.OIDC.IssuerURL, "oidc-issuer-url", "",
		"URL of an issuer of OIDC tokens; --authentication-config says more")
	f.StringVar(&o.OIDC.ClientID, "oidc-client-id", "", "audience of that issuer's tokens")
	f.StringVar(&o.OIDC.CAFile, "oidc-ca-file", "",
		"file with the authority of that issuer's certificate (default: the system's)")
	f.StringVar(&o.OIDC.UsernameClaim, "oidc-username-claim", o.OIDC.UsernameClaim, "claim that is the user name")
	f.StringVar(&o.OIDC.UsernamePrefix, "oidc-username-prefix", "",
		"what stands before that issuer's user names, - for nothing (default: the issuer's URL and #, nothing for claim email)")
	f.StringVar(&o.OIDC.GroupsClaim, "oidc-groups-claim", "", "claim with the groups")
	f.StringVar(&o.OIDC.GroupsPrefix, "oidc-groups-prefix", "", "what stands before that issuer's groups")
	f.StringSliceVar(&o.OIDC.SigningAlgs, "oidc-signing-algs", o.OIDC.SigningAlgs,
		"algorithms by which that issuer may sign")
	f.StringToStringVar(&o.OIDC.RequiredClaims, "oidc-required-claim", nil,
		"key=value that a token of that issuer must claim (repeatable)")
	f.StringVar(&o.TokenFile, "token-auth-file", "",
		"file of static tokens, in lines of token,user,uid,\"group1,group2\"; read again when it changes")
	f.StringVar(&o.WebhookConfig, "authentication-token-webhook-config-file", "",
		"kubeconfig of a service that answers TokenReviews")
	f.StringVar(&o.WebhookVersion, "authentication-token-webhook-version", o.WebhookVersion,
		"version of TokenReview that it speaks: v1 or v1beta1")
	f.DurationVar(&o.WebhookTTL, "authentication-token-webhook-cache-ttl", o.WebhookTTL,
		"for how long its answers are remembered")
	f.BoolVar(&o.BootstrapTokens, "enable-bootstrap-token-auth", false,
		"let Secrets of type bootstrap.kubernetes.io/token in kube-system authenticate")
	h := &o.RequestHeader
	f.StringVar(&h.ClientCAFile, "requestheader-client-ca-file", "",
		"file with the authority of proxies that are believed about whom they authenticated")
	f.StringSliceVar(&h.AllowedNames, "requestheader-allowed-names", nil,
		"common names of those proxies (default: any of that authority)")
	f.StringSliceVar(&h.UsernameHeaders, "requestheader-username-headers", nil,
		"headers with the user name, such as X-Remote-User")
	f.StringSliceVar(&h.UIDHeaders, "requestheader-uid-headers", nil,
		"headers with the user's uid, such as X-Remote-Uid")
	f.StringSliceVar(&h.GroupHeaders, "requestheader-group-headers", nil,
		"headers with the groups, such as X-Remote-Group")
	f.StringSliceVar(&h.ExtraPrefixes, "requestheader-extra-headers-prefix", nil,
		"how headers with further attributes begin, such as X-Remote-Extra-")
	return anonymous
}

func authorizationFlags(c *cobra.Command, o *authzfile.Options) {
	*o = authzfile.Defaults()
	f := c.Flags()
	f.StringVar(&o.ConfigFile, "authorization-config", "",
		"file with an AuthorizationConfiguration: which authorizers are asked in which order; read again when it changes")
	f.StringSliceVar(&o.Modes, "authorization-mode", nil,
		"authorizers in order: Node, RBAC, ABAC, Webhook, AlwaysAllow, AlwaysDeny (default Node,RBAC)")
	f.StringVar(&o.PolicyFile, "authorization-policy-file", "",
		"file with a policy a line, for ABAC; read again when it changes")
	f.StringVar(&o.WebhookConfig, "authorization-webhook-config-file", "",
		"kubeconfig of a service that answers SubjectAccessReviews, for mode Webhook")
	f.StringVar(&o.WebhookVersion, "authorization-webhook-version", o.WebhookVersion,
		"version of SubjectAccessReview that it speaks: v1 or v1beta1")
	f.DurationVar(&o.AuthorizedTTL, "authorization-webhook-cache-authorized-ttl", o.AuthorizedTTL,
		"for how long its permissions are remembered")
	f.DurationVar(&o.UnauthorizedTTL, "authorization-webhook-cache-unauthorized-ttl", o.UnauthorizedTTL,
		"for how long its other answers are remembered")
}
