// What a program with @kubernetes/client-node does: the library as it is released, told by NODE_PATH's folder where it is.
import { createRequire } from 'node:module';
import { PassThrough } from 'node:stream';
import assert from 'node:assert/strict';
const k8s = await import(createRequire(process.env.CLIENT_FOLDER + '/').resolve('@kubernetes/client-node'));

const namespace = process.env.NAMESPACE;
const config = new k8s.KubeConfig();
config.loadFromFile(process.env.KUBECONFIG);
const core = config.makeApiClient(k8s.CoreV1Api);
const apps = config.makeApiClient(k8s.AppsV1Api);
const custom = config.makeApiClient(k8s.CustomObjectsApi);
const objects = k8s.KubernetesObjectApi.makeApiClient(config);

// Resolves with the first value for which seen has been called.
function signal() {
  let seen;
  const promise = new Promise((resolve) => { seen = resolve; });
  return { promise, seen };
}

// An informer sees a config map come, change and go.
const added = signal(), changed = signal(), gone = signal();
const list = () => core.listNamespacedConfigMap({ namespace, labelSelector: 'app=node' });
const informer = k8s.makeInformer(config, `/api/v1/namespaces/${namespace}/configmaps`, list, 'app=node');
informer.on('add', (o) => added.seen(o));
informer.on('update', (o) => changed.seen(o));
informer.on('delete', (o) => gone.seen(o));
let stopping = false; // it calls the end that it is told of an error
informer.on('error', (err) => { if (!stopping) { console.error('informer', err); process.exit(1); } });
await informer.start();

const body = { metadata: { name: 'motd', labels: { app: 'node' } }, data: { greeting: 'hello' } };
const made = await core.createNamespacedConfigMap({ namespace, body });
assert.equal(made.data.greeting, 'hello');
assert.ok(made.metadata.creationTimestamp instanceof Date);
assert.equal((await added.promise).metadata.uid, made.metadata.uid);
await assert.rejects(core.createNamespacedConfigMap({ namespace, body }), (err) => err.code === 409);

const patch = (strategy, patchBody) => core.patchNamespacedConfigMap(
  { namespace, name: 'motd', body: patchBody, fieldManager: 'node', force: strategy === k8s.PatchStrategy.ServerSideApply || undefined },
  k8s.setHeaderOptions('Content-Type', strategy));
await patch(k8s.PatchStrategy.JsonPatch, [{ op: 'add', path: '/data/json', value: '1' }]);
await patch(k8s.PatchStrategy.MergePatch, { data: { merge: '2' } });
await patch(k8s.PatchStrategy.StrategicMergePatch, { data: { strategic: '3' } });
const applied = await patch(k8s.PatchStrategy.ServerSideApply,
  { apiVersion: 'v1', kind: 'ConfigMap', metadata: { name: 'motd' }, data: { applied: '4' } });
assert.deepEqual(applied.data, { greeting: 'hello', json: '1', merge: '2', strategic: '3', applied: '4' });
assert.equal((await changed.promise).metadata.uid, made.metadata.uid);
await core.deleteNamespacedConfigMap({ namespace, name: 'motd' });
assert.equal((await gone.promise).metadata.uid, made.metadata.uid);
stopping = true;
await informer.stop();

// A pod: created, watched until it runs, its log, a command in it.
const watched = signal();
const watch = new k8s.Watch(config);
const request = await watch.watch(`/api/v1/namespaces/${namespace}/pods`, { fieldSelector: 'metadata.name=one' },
  (type, pod) => { if (pod.status?.phase === 'Running') watched.seen(pod); }, () => {});
await core.createNamespacedPod({ namespace, body: {
  metadata: { name: 'one' },
  spec: { terminationGracePeriodSeconds: 0, containers: [{ name: 'main', image: 'keelson.dev/tools:v1', command: ['sh', '-c', 'echo started; exec sleep 1000000'] }] },
} });
await watched.promise;
request.abort();
const log = new PassThrough();
let said = '';
const logged = signal();
log.on('data', (b) => { said += b; if (said.includes('started\n')) logged.seen(); });
const following = await new k8s.Log(config).log(namespace, 'one', 'main', log, { follow: true });
await logged.promise;
following?.abort();
const out = new PassThrough();
let answer = '';
out.on('data', (b) => { answer += b; });
const ended = signal();
await new k8s.Exec(config).exec(namespace, 'one', 'main', ['echo', 'from within'], out, process.stderr, null, false, (status) => ended.seen(status));
assert.equal((await ended.promise).status, 'Success');
assert.equal(answer, 'from within\n');

// Other groups, an object of any kind, a custom resource.
assert.deepEqual((await apps.listNamespacedDeployment({ namespace })).items, []);
const any = await objects.create({ apiVersion: 'v1', kind: 'Secret', metadata: { name: 's', namespace }, stringData: { k: 'v' } });
assert.equal(any.data.k, 'dg==');
const tea = { group: 'node.example.com', version: 'v1', namespace, plural: 'teas' };
await custom.createNamespacedCustomObject({ ...tea, body: { apiVersion: 'node.example.com/v1', kind: 'Tea', metadata: { name: 'green' }, spec: { grams: 3 } } });
const green = await custom.getNamespacedCustomObject({ ...tea, name: 'green' });
assert.deepEqual(green.spec, { grams: 3, cups: 1 });
console.log('all is well');
process.exit(0);
